// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Baseline of the benchmarks: the library calls that the engine cannot avoid, with the libraries
//! and settings that the engine uses.

use tmem_pool::{PAGE_SIZE, Page};

/// Acceleration parameter of lz4: lz4's default, which the engine uses too.
const ACCELERATION: i32 = 1;

/// Longest stored form of a compressed page in bytes, including one byte for the codec. The engine
/// stores pages with longer forms raw, so lz4 may stop when it reaches this length.
const ENCODED_BYTES_MAX: usize = 3772;

/// Compresses a page with `LZ4_compress_fast`. Returns None if the compressed form is too long for
/// the engine to store.
pub fn compress<'a>(page: &Page, out: &'a mut Page) -> Option<&'a [u8]> {
    // SAFETY: both pointers are valid for the lengths passed with them.
    let len = unsafe {
        lz4_sys::LZ4_compress_fast(
            page.as_ptr().cast(),
            out.as_mut_ptr().cast(),
            PAGE_SIZE as i32,
            ENCODED_BYTES_MAX as i32 - 1,
            ACCELERATION,
        )
    };
    (len > 0).then(|| &out[..len as usize])
}

/// Decompresses a page with `LZ4_decompress_safe`.
///
/// # Panics
/// If `stored` is not a page that lz4 compressed.
pub fn decompress(stored: &[u8], out: &mut Page) {
    // SAFETY: both pointers are valid for the lengths passed with them.
    let len = unsafe {
        lz4_sys::LZ4_decompress_safe(
            stored.as_ptr().cast(),
            out.as_mut_ptr().cast(),
            stored.len() as i32,
            PAGE_SIZE as i32,
        )
    };
    assert_eq!(
        len, PAGE_SIZE as i32,
        "LZ4_decompress_safe did not restore a complete page"
    );
}

/// Returns the length of the page in bytes after lz4, or the page size if the compressed form is
/// too long for the engine to store.
pub fn lz4_bytes(page: &Page) -> usize {
    compress(page, &mut [0; PAGE_SIZE]).map_or(PAGE_SIZE, <[u8]>::len)
}

/// Returns whether all bytes of the page are equal.
pub fn same_filled(page: &Page) -> bool {
    page.iter().all(|byte| *byte == page[0])
}
