// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Codec that converts a page to its stored form and back. A stored form is a repeated pattern,
//! compressed bytes, or the page itself (raw).
//!
//! zstd copies parts of a page into its contexts (working memory). So a context lies in memory that
//! is never dumped and, where the process may lock memory, never swapped. The engine wipes contexts
//! after use, so that no byte of a page outlives the step that needed it. lz4 keeps no bytes of a
//! page: its table on the stack has positions only.
//!
//! A stored form that is as long as a page is the page itself. Any other form begins with a byte
//! that names its codec. Only the engine writes stored forms. Decoding checks its bounds
//! nevertheless: a damaged form results in an error, and no byte outside the page is written.

use crate::config::{PAGE_SIZE, Page};
use crate::secret::SecretPages;
use std::cell::RefCell;
use std::ffi::c_int;
use std::io;
use std::ptr::NonNull;
use zeroize::Zeroizing;
use zstd_safe::zstd_sys::{self, ZSTD_CCtx, ZSTD_DCtx, ZSTD_cParameter, ZSTD_dParameter};

/// Longest compressed form in bytes. A page whose compressed form would be longer is stored raw. A
/// longer form would take a slot of a whole frame (heap/class.rs), so that compression would save no
/// memory.
pub(crate) const ENCODED_BYTES_MAX: usize = 3772;

/// Acceleration factor of lz4: 1, which is lz4's default. Factor 4 is 20 % faster but needs 10 %
/// more bytes, and the pool's purpose is to save bytes.
const LZ4_ACCELERATION: c_int = 1;

/// First byte of a stored form that continues with an lz4 block.
const FORM_LZ4: u8 = 1;

/// First byte of a stored form that continues with a zstd frame. The frame has no magic number,
/// length or checksum.
const FORM_ZSTD: u8 = 2;

/// Compression level of zstd. Level 3 takes a sixth more time and saves only 2 % of the bytes.
const ZSTD_LEVEL: i32 = 1;

/// Range of lengths in bytes: the engine recompresses a cold page with zstd if its lz4 form has
/// such a length. Measurements showed that zstd makes these forms notably smaller.
pub(crate) const DENSER_BYTES: std::ops::RangeInclusive<usize> = 1024..=ENCODED_BYTES_MAX;

/// Frame format ZSTD_f_zstd1_magicless: frames that do not begin with the four bytes of a magic
/// number.
const ZSTD_MAGICLESS: c_int = zstd_sys::ZSTD_format_e::ZSTD_f_zstd1_magicless as c_int;

thread_local! {
    /// zstd context (working memory) for decompression: 96 KiB in each thread that restores pages.
    /// It is None until the thread decompresses its first zstd frame.
    static RESTORER: RefCell<Option<Restorer>> = const { RefCell::new(None) };
}

/// zstd context (working memory) with which a thread decompresses pages.
struct Restorer {
    /// Memory in which zstd creates its context.
    memory: SecretPages,
    /// True if the memory contains a zstd context, and perhaps parts of a page. If false, all bytes
    /// of the memory are zero.
    in_use: bool,
}

impl Restorer {
    fn new() -> io::Result<Restorer> {
        // SAFETY: the function only computes a size.
        let bytes = unsafe { zstd_sys::ZSTD_estimateDCtxSize() };
        Ok(Restorer {
            memory: SecretPages::new(bytes.div_ceil(PAGE_SIZE))?,
            in_use: false,
        })
    }

    /// Returns the zstd context, and creates it if necessary. Returns None if zstd rejects the size
    /// of the memory or the frame format, which no released version does.
    fn context(&mut self) -> Option<NonNull<ZSTD_DCtx>> {
        let memory = self.memory.pages().as_flattened_mut();
        let (at, bytes) = (memory.as_mut_ptr(), memory.len());
        if self.in_use {
            // zstd creates a context at the first byte of its memory, so a pointer to the memory is
            // also a pointer to the context.
            return NonNull::new(at.cast());
        }
        // SAFETY: no other object uses the memory, which is aligned to a page and outlives each use
        // of the context.
        let context = NonNull::new(unsafe { zstd_sys::ZSTD_initStaticDCtx(at.cast(), bytes) })?;
        let format = ZSTD_dParameter::ZSTD_d_experimentalParam1;
        let result =
            // SAFETY: the context is valid, because zstd has just initialized it.
            unsafe { zstd_sys::ZSTD_DCtx_setParameter(context.as_ptr(), format, ZSTD_MAGICLESS) };
        self.in_use = true;
        is_ok(result).then_some(context)
    }

    /// Decompresses a zstd frame into `out`. Returns the number of bytes written, or None if the
    /// frame is damaged.
    fn restore(&mut self, frame: &[u8], out: &mut Page) -> Option<usize> {
        let context = self.context()?;
        // SAFETY: the context belongs to this object, and both pointers are valid for the lengths
        // passed with them.
        let len = unsafe {
            zstd_sys::ZSTD_decompressDCtx(
                context.as_ptr(),
                out.as_mut_ptr().cast(),
                PAGE_SIZE,
                frame.as_ptr().cast(),
                frame.len(),
            )
        };
        is_ok(len).then_some(len)
    }

    fn wipe(&mut self) {
        if self.in_use {
            self.in_use = false;
            self.memory.wipe();
        }
    }
}

/// Returns whether zstd's result is a length and not an error code.
fn is_ok(result: usize) -> bool {
    // SAFETY: the function only compares numbers.
    unsafe { zstd_sys::ZSTD_isError(result) == 0 }
}

/// Overwrites the calling thread's zstd context for decompression with zeroes, because the context
/// may contain parts of restored pages.
pub(crate) fn wipe() {
    // `try_with` fails if the thread is ending and has already freed its context. Nothing is left
    // to wipe then, so ignore the error.
    let _ = RESTORER.try_with(|restorer| {
        if let Some(restorer) = &mut *restorer.borrow_mut() {
            restorer.wipe();
        }
    });
}

/// Restores a page from a zstd frame. Returns None if the frame is damaged, or if the system has no
/// memory for this thread's zstd context. The caller treats the stored copy as damaged in both
/// cases.
fn restore(frame: &[u8], out: &mut Page) -> Option<usize> {
    RESTORER.with_borrow_mut(|restorer| {
        if restorer.is_none() {
            *restorer = Restorer::new().ok();
        }
        restorer.as_mut()?.restore(frame, out)
    })
}

/// Error: stored bytes do not decode to a page, or the decoded page does not match its hash.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Corrupt;

/// Returns the four bytes that the page repeats, or None if the page does not repeat four bytes.
pub(crate) fn same_filled(page: &Page) -> Option<u32> {
    let (words, _) = page.as_chunks::<8>();
    let first = words[0];
    // Compare the last word first. In most pages, it or a word of the first cache line differs from
    // the first word, so that few pages are read to the end.
    let same = words[words.len() - 1] == first && words.iter().all(|w| *w == first);
    let [low, high] = [0, 4]
        .map(|at| u32::from_ne_bytes([first[at], first[at + 1], first[at + 2], first[at + 3]]));
    (same && low == high).then_some(low)
}

/// Fills a page with a pattern that `same_filled` returned.
pub(crate) fn fill(pattern: u32, out: &mut Page) {
    out.as_chunks_mut::<4>().0.fill(pattern.to_ne_bytes());
}

/// Returns the lz4 form of a page, or None if that form is longer than ENCODED_BYTES_MAX.
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

/// Returns the size in bytes of a page after its first compression. It is 0 for a page that repeats
/// four bytes, and [`PAGE_SIZE`] for a page that does not compress. The call takes as long as
/// compressing the page.
pub fn stored_bytes(page: &Page) -> usize {
    match same_filled(page) {
        Some(_) => 0,
        // The compressed form has bytes of the page, and the stack may be swapped.
        None => encode(page, &mut Zeroizing::new([0; PAGE_SIZE])).map_or(PAGE_SIZE, <[u8]>::len),
    }
}

/// Returns whether a stored form is decoded by zstd, which takes twice as long as lz4.
pub(crate) fn is_dense(bytes: &[u8]) -> bool {
    bytes.len() < PAGE_SIZE && bytes.first() == Some(&FORM_ZSTD)
}

/// zstd compressor for cold pages. zstd is slower than lz4 and makes pages smaller.
pub(crate) struct Denser {
    /// Memory in which zstd creates its context: 76 KiB. It is this small because zstd sizes its
    /// tables by the length of a page.
    memory: SecretPages,
    /// True if the memory contains a zstd context, and perhaps parts of a page. If false, all bytes
    /// of the memory are zero.
    in_use: bool,
}

impl Denser {
    /// Creates a zstd compressor.
    ///
    /// # Errors
    /// The system does not provide the address space for zstd's memory.
    pub(crate) fn new() -> io::Result<Denser> {
        // SAFETY: the functions only compute a size.
        let bytes = unsafe {
            let parameters = zstd_sys::ZSTD_getCParams(ZSTD_LEVEL, PAGE_SIZE as u64, 0);
            zstd_sys::ZSTD_estimateCCtxSize_usingCParams(parameters)
        };
        Ok(Denser {
            memory: SecretPages::new(bytes.div_ceil(PAGE_SIZE))?,
            in_use: false,
        })
    }

    /// Returns the zstd context, and creates it if necessary. Returns None if zstd rejects the size
    /// of the memory or a parameter of compression, which no released version does.
    fn context(&mut self) -> Option<NonNull<ZSTD_CCtx>> {
        let memory = self.memory.pages().as_flattened_mut();
        let (at, bytes) = (memory.as_mut_ptr(), memory.len());
        if self.in_use {
            // zstd creates a context at the first byte of its memory, so a pointer to the memory is
            // also a pointer to the context.
            return NonNull::new(at.cast());
        }
        // SAFETY: no other object uses the memory, which is aligned to a page and outlives each use
        // of the context.
        let context = NonNull::new(unsafe { zstd_sys::ZSTD_initStaticCCtx(at.cast(), bytes) })?;
        self.in_use = true;
        let parameters = [
            (ZSTD_cParameter::ZSTD_c_compressionLevel, ZSTD_LEVEL),
            // Make zstd write frames without a magic number.
            (ZSTD_cParameter::ZSTD_c_experimentalParam2, ZSTD_MAGICLESS),
            (ZSTD_cParameter::ZSTD_c_contentSizeFlag, 0),
            (ZSTD_cParameter::ZSTD_c_checksumFlag, 0),
        ];
        let all = parameters.into_iter().all(|(parameter, value)| {
            // SAFETY: the context is valid, because zstd has just initialized it.
            is_ok(unsafe { zstd_sys::ZSTD_CCtx_setParameter(context.as_ptr(), parameter, value) })
        });
        all.then_some(context)
    }

    /// Returns the zstd form of a page, or None if zstd cannot compress the page into `bytes_max`
    /// bytes.
    pub(crate) fn encode<'a>(
        &mut self,
        page: &Page,
        buffer: &'a mut Page,
        bytes_max: usize,
    ) -> Option<&'a [u8]> {
        buffer[0] = FORM_ZSTD;
        let context = self.context()?;
        let out = &mut buffer[1..bytes_max];
        // SAFETY: the context belongs to this object, and both pointers are valid for the lengths
        // passed with them.
        let len = unsafe {
            zstd_sys::ZSTD_compress2(
                context.as_ptr(),
                out.as_mut_ptr().cast(),
                out.len(),
                page.as_ptr().cast(),
                PAGE_SIZE,
            )
        };
        is_ok(len).then(|| &buffer[..1 + len])
    }

    /// Overwrites the zstd context with zeroes, because it may contain parts of pages.
    pub(crate) fn wipe(&mut self) {
        if self.in_use {
            self.in_use = false;
            self.memory.wipe();
        }
    }
}

/// Restores a page from its stored form, which is raw, lz4 or zstd. After an error, the contents of
/// `out` are unspecified.
pub(crate) fn decode(stored: &[u8], out: &mut Page) -> Result<(), Corrupt> {
    if stored.len() == PAGE_SIZE {
        out.copy_from_slice(stored);
        return Ok(());
    }
    let block = match stored.split_first() {
        Some((&FORM_LZ4, block)) => block,
        Some((&FORM_ZSTD, frame)) => {
            return match restore(frame, out) {
                Some(PAGE_SIZE) => Ok(()),
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

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;

    fn text() -> Page {
        std::array::from_fn(|at| b'a' + (at * at * 31 / 7 % 13) as u8)
    }

    #[test]
    fn stored_bytes_equals_the_length_of_the_encoded_page() {
        assert_eq!(stored_bytes(&[7; PAGE_SIZE]), 0);
        assert_eq!(stored_bytes(&crate::tests::noise(1)), PAGE_SIZE);
        let mut page = [1; PAGE_SIZE];
        page[9] = 2;
        assert!((1..256).contains(&stored_bytes(&page)));
    }

    #[test]
    fn wiping_a_zstd_context_zeroes_its_memory() {
        let (page, mut buffer, mut out) = (text(), [0; PAGE_SIZE], [0; PAGE_SIZE]);
        let mut denser = Denser::new().expect("cannot allocate a zstd context");
        let mut restorer = Restorer::new().expect("cannot allocate a zstd context");
        let is_zero =
            |memory: &mut SecretPages| memory.pages().iter().all(|page| *page == [0; PAGE_SIZE]);
        // Run several rounds, so that the test also uses zstd contexts that were wiped and
        // initialized again.
        for _ in 0..3 {
            let stored = denser
                .encode(&page, &mut buffer, PAGE_SIZE)
                .expect("the test page does not compress");
            assert_eq!(restorer.restore(&stored[1..], &mut out), Some(PAGE_SIZE));
            assert!(out == page);
            assert!(!is_zero(&mut denser.memory) && !is_zero(&mut restorer.memory));
            denser.wipe();
            restorer.wipe();
            assert!(is_zero(&mut denser.memory) && is_zero(&mut restorer.memory));
        }
    }
}
