// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the engine cannot do without, alone: the same libraries with the same settings.

use tmem_pool::{PAGE_SIZE, Page};

/// The engine's: lz4's default.
const ACCELERATION: i32 = 1;

/// Forms above this are kept raw by the engine, so that lz4 may give up there.
const ENCODED_BYTES_MAX: usize = 3840;

/// `LZ4_compress_fast`. None: it does not shrink enough.
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

/// `LZ4_decompress_safe`.
///
/// # Panics
/// The bytes are not a page.
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
    assert_eq!(len, PAGE_SIZE as i32, "a stored page");
}

/// Bytes that lz4 makes of a page, or a page.
pub fn lz4_bytes(page: &Page) -> usize {
    compress(page, &mut [0; PAGE_SIZE]).map_or(PAGE_SIZE, <[u8]>::len)
}

/// All its bytes are equal.
pub fn same_filled(page: &Page) -> bool {
    page.iter().all(|byte| *byte == page[0])
}
