// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A page and its stored form: a repeated pattern, lz4, or raw. Pure functions, no state.
//!
//! Stored bytes are the host's own, but decompression is bounded all the same: a broken blob gives
//! an error, never a byte outside the page.

use crate::config::{PAGE_SIZE, Page};
use std::ffi::c_int;

/// Compressed pages above this are kept raw: the rest saves nothing (measured: .0004 of the store).
pub(crate) const COMPRESSED_BYTES_MAX: usize = 3840;

/// lz4's default. 4 is a fifth faster and costs a tenth more bytes, and bytes are what the pool is
/// for.
const LZ4_ACCELERATION: c_int = 1;

/// The stored bytes do not decode to a page.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Corrupt;

/// The eight bytes that the page repeats, if it does.
pub(crate) fn same_filled(page: &Page) -> Option<[u8; 8]> {
    let (words, _) = page.as_chunks::<8>();
    let first = words[0];
    // Most pages differ at once, at an end or in the first line; only the others are read through.
    (words[words.len() - 1] == first && words.iter().all(|w| *w == first)).then_some(first)
}

/// Fills a page with a pattern of `same_filled`.
pub(crate) fn fill(pattern: [u8; 8], out: &mut Page) {
    out.as_chunks_mut::<8>().0.fill(pattern);
}

/// Compresses into `buffer` and returns the stored form, which is the page itself if it does not
/// shrink enough.
pub(crate) fn compress<'a>(page: &'a Page, buffer: &'a mut [u8; COMPRESSED_BYTES_MAX]) -> &'a [u8] {
    // SAFETY: both pointers are valid for the lengths passed with them; lz4 writes at most the
    // capacity and returns 0 if the result does not fit.
    let len = unsafe {
        lz4_sys::LZ4_compress_fast(
            page.as_ptr().cast(),
            buffer.as_mut_ptr().cast(),
            PAGE_SIZE as c_int,
            COMPRESSED_BYTES_MAX as c_int,
            LZ4_ACCELERATION,
        )
    };
    match usize::try_from(len) {
        Ok(len @ 1..=COMPRESSED_BYTES_MAX) => &buffer[..len],
        _ => page,
    }
}

/// Restores a page from its stored form. `out` is unspecified after an error.
pub(crate) fn decompress(stored: &[u8], out: &mut Page) -> Result<(), Corrupt> {
    if stored.len() == PAGE_SIZE {
        out.copy_from_slice(stored);
        return Ok(());
    }
    if stored.len() > COMPRESSED_BYTES_MAX {
        return Err(Corrupt);
    }
    // SAFETY: both pointers are valid for the lengths passed with them; the safe variant of the
    // decoder reads and writes nothing outside them, whatever the input.
    let len = unsafe {
        lz4_sys::LZ4_decompress_safe(
            stored.as_ptr().cast(),
            out.as_mut_ptr().cast(),
            stored.len() as c_int,
            PAGE_SIZE as c_int,
        )
    };
    if len == PAGE_SIZE as c_int {
        Ok(())
    } else {
        Err(Corrupt)
    }
}
