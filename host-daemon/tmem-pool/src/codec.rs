// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A page and its stored form: a repeated pattern, compressed, or raw. Pure functions, no state.
//!
//! A stored form as long as a page is the page. Any other begins with a byte that names its codec.
//! Stored bytes are the host's own, but decoding is bounded all the same: a broken form gives an
//! error, never a byte outside the page.

use crate::config::{PAGE_SIZE, Page};
use std::cell::RefCell;
use std::ffi::c_int;
use zstd_safe::{CCtx, CParameter, DCtx, DParameter, FrameFormat};

/// Forms above this are kept raw: the rest saves nothing (measured: .0004 of the store).
pub(crate) const ENCODED_BYTES_MAX: usize = 3840;

/// lz4's default. 4 is a fifth faster and costs a tenth more bytes, and bytes are what the pool is
/// for.
const LZ4_ACCELERATION: c_int = 1;

/// First byte of a form that an lz4 block follows.
const FORM_LZ4: u8 = 1;

/// First byte of a form that a zstd frame without magic number, length and checksum follows.
const FORM_ZSTD: u8 = 2;

/// 3 takes a sixth longer for 2 % fewer bytes.
const ZSTD_LEVEL: i32 = 1;

/// Forms between these lengths gain from zstd; others hardly (measured).
pub(crate) const DENSER_BYTES: std::ops::RangeInclusive<usize> = 1024..=3840;

thread_local! {
    // 95 KiB for each thread that restores pages.
    static ZSTD: RefCell<DCtx<'static>> = RefCell::new({
        let mut context = DCtx::create();
        context
            .set_parameter(DParameter::Format(FrameFormat::Magicless))
            .expect("zstd knows the parameter");
        context
    });
}

/// The stored bytes do not decode to a page.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Corrupt;

/// The four bytes that the page repeats, if it does.
pub(crate) fn same_filled(page: &Page) -> Option<u32> {
    let (words, _) = page.as_chunks::<8>();
    let first = words[0];
    // Most pages differ at once, at an end or in the first line; only the others are read through.
    let same = words[words.len() - 1] == first && words.iter().all(|w| *w == first);
    let [low, high] = [0, 4]
        .map(|at| u32::from_ne_bytes([first[at], first[at + 1], first[at + 2], first[at + 3]]));
    (same && low == high).then_some(low)
}

/// Fills a page with a pattern of `same_filled`.
pub(crate) fn fill(pattern: u32, out: &mut Page) {
    out.as_chunks_mut::<4>().0.fill(pattern.to_ne_bytes());
}

/// The compressed form of a page. None: it does not shrink enough.
pub(crate) fn encode<'a>(page: &Page, buffer: &'a mut Page) -> Option<&'a [u8]> {
    buffer[0] = FORM_LZ4;
    let out = &mut buffer[1..ENCODED_BYTES_MAX];
    // SAFETY: both pointers are valid for the lengths passed with them; lz4 writes at most the
    // capacity and returns 0 if the result does not fit.
    let len = unsafe {
        lz4_sys::LZ4_compress_fast(
            page.as_ptr().cast(),
            out.as_mut_ptr().cast(),
            PAGE_SIZE as c_int,
            out.len() as c_int,
            LZ4_ACCELERATION,
        )
    };
    match usize::try_from(len) {
        Ok(len @ 1..ENCODED_BYTES_MAX) => Some(&buffer[..1 + len]),
        _ => None,
    }
}

/// Compresses pages further, and slower. 0.6 MiB.
pub(crate) struct Denser(CCtx<'static>);

impl Denser {
    pub(crate) fn new() -> Denser {
        let mut context = CCtx::create();
        for parameter in [
            CParameter::CompressionLevel(ZSTD_LEVEL),
            CParameter::Format(FrameFormat::Magicless),
            CParameter::ContentSizeFlag(false),
            CParameter::ChecksumFlag(false),
        ] {
            context
                .set_parameter(parameter)
                .expect("zstd knows the parameter");
        }
        Denser(context)
    }

    /// The denser form of a page. None: it is as long as `bytes_max`, or longer.
    pub(crate) fn encode<'a>(
        &mut self,
        page: &Page,
        buffer: &'a mut Page,
        bytes_max: usize,
    ) -> Option<&'a [u8]> {
        buffer[0] = FORM_ZSTD;
        let Denser(context) = self;
        let len = context.compress2(&mut buffer[1..bytes_max], page).ok()?;
        Some(&buffer[..1 + len])
    }
}

/// Restores a page from its stored form. `out` is unspecified after an error.
pub(crate) fn decode(stored: &[u8], out: &mut Page) -> Result<(), Corrupt> {
    if stored.len() == PAGE_SIZE {
        out.copy_from_slice(stored);
        return Ok(());
    }
    let block = match stored.split_first() {
        Some((&FORM_LZ4, block)) => block,
        Some((&FORM_ZSTD, frame)) => {
            return match ZSTD.with_borrow_mut(|context| context.decompress(&mut out[..], frame)) {
                Ok(PAGE_SIZE) => Ok(()),
                _ => Err(Corrupt),
            };
        }
        _ => return Err(Corrupt),
    };
    // SAFETY: both pointers are valid for the lengths passed with them; the safe variant of the
    // decoder reads and writes nothing outside them, whatever the input.
    let len = unsafe {
        lz4_sys::LZ4_decompress_safe(
            block.as_ptr().cast(),
            out.as_mut_ptr().cast(),
            block.len() as c_int,
            PAGE_SIZE as c_int,
        )
    };
    if len == PAGE_SIZE as c_int {
        Ok(())
    } else {
        Err(Corrupt)
    }
}
