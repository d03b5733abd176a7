// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Size classes of the heap. All slots of a class have one size, and lie in spans, which are groups
//! of 1 to 12 adjacent frames of 4 KiB. The numbers of frames and slots of a class's spans are
//! chosen so that little memory is wasted for that size.
//!
//! The idea is zsmalloc's (mm/zsmalloc.c): a slot may lie across two frames, so that sizes that do
//! not divide a frame waste little. Unlike in zsmalloc, the frames of a span are adjacent in
//! address space, so that the bytes of a slot are contiguous. A slot begins with a header that
//! names the handle of its bytes, so that compaction finds the handle. A raw page fills a frame of
//! its own, which compaction never moves, so it needs no header.

use super::region::FRAME_BYTES;
use crate::config::{ADDRESS_SPACE_TIMES, PAGE_SIZE};

/// Largest number of frames (4 KiB) of a span. The waste of full spans was computed for the lengths
/// of lz4 forms from 1 KiB on. With at most 8 frames it is 1.8 to 3.9 % (most in the longest slots),
/// with 12 frames 1.2 to 1.6 %, and with 16 frames 0.8 to 1.3 %. The last span of each class is half
/// free on average. The free halves of all classes together take 0.9, 1.5 and 1.8 MiB with 8, 12
/// and 16 frames, which matters in small pools.
pub(crate) const SPAN_FRAMES_MAX: usize = 12;
const _: () = assert!(SPAN_FRAMES_MAX as u64 + 2 == ADDRESS_SPACE_TIMES);

/// Bytes of the header at the beginning of a slot. The header contains the handle of the slot's
/// bytes. In a free slot it is 0.
pub(crate) const HEADER_BYTES: usize = 4;

/// Unit of slot sizes in bytes: all slot sizes are multiples of it, so that the headers are
/// aligned.
const GRAIN_BYTES: usize = 16;

/// Size of the smallest slot in bytes. SLOTS_MAX slots of this size fill a frame. Few pages
/// compress to less: 1.1 % of the pages of the files of a Debian system that lz4 can compress.
const SLOT_BYTES_MIN: usize = FRAME_BYTES / SLOTS_MAX;

/// Largest number of slots of a span. The record of a span has a bit for each.
pub(crate) const SLOTS_MAX: usize = 32;

/// Acceptable waste of a span, as a fraction of the span's bytes. A class has a span with more
/// frames only if the spans with fewer frames waste more than this.
const WASTE_OK: f64 = 0.015;

/// Size class: the size of its slots, and the numbers of slots and frames of its spans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Class {
    /// Bytes of a slot, header included.
    pub slot_bytes: u16,
    /// Number of slots of a span.
    pub slots: u8,
    /// Number of frames of a span.
    pub frames: u8,
    /// Bytes of the header of a slot; 0 if the slot is a whole frame for a raw page.
    pub header_bytes: u8,
}

impl Class {
    /// Returns the largest number of bytes that can be stored in a slot, without its header.
    #[cfg(test)]
    fn payload_max(&self) -> usize {
        usize::from(self.slot_bytes) - usize::from(self.header_bytes)
    }

    /// Class of raw (uncompressed) pages. A slot is a whole frame, and a span has one slot.
    const RAW: Class = Class {
        slot_bytes: FRAME_BYTES as u16,
        slots: 1,
        frames: 1,
        header_bytes: 0,
    };

    /// Returns a class whose slots have at least this size. Its spans have the smallest number of
    /// frames with acceptable waste or, if there is none, the number of frames that wastes least. A
    /// span has at most SLOTS_MAX slots.
    fn for_size(slot_bytes: usize) -> Class {
        let waste = |frames: usize| {
            let bytes = frames * FRAME_BYTES;
            (bytes % slot_bytes) as f64 / bytes as f64
        };
        let lengths = 1..=(SPAN_FRAMES_MAX.min(SLOTS_MAX * slot_bytes / FRAME_BYTES));
        let frames = lengths
            .clone()
            .find(|&frames| frames * FRAME_BYTES >= slot_bytes && waste(frames) <= WASTE_OK)
            .or_else(|| {
                let fits = lengths.filter(|frames| frames * FRAME_BYTES >= slot_bytes);
                fits.min_by(|&a, &b| waste(a).total_cmp(&waste(b)))
            })
            .expect("a slot of this size does not fit into the largest span");
        let slots = frames * FRAME_BYTES / slot_bytes;
        assert!(slots <= SLOTS_MAX);
        // Divide the waste at the end of the span among the slots, as far as the alignment of slots
        // allows.
        let slot_bytes = frames * FRAME_BYTES / slots / GRAIN_BYTES * GRAIN_BYTES;
        Class {
            slot_bytes: slot_bytes as u16,
            slots: slots as u8,
            frames: frames as u8,
            header_bytes: HEADER_BYTES as u8,
        }
    }
}

/// All size classes, ordered by size.
#[derive(Debug)]
pub(crate) struct Classes {
    classes: Vec<Class>,
    /// Maps a slot size, in units of GRAIN_BYTES, to the number of its class.
    by_grains: Vec<u8>,
}

impl Classes {
    pub(crate) fn new() -> Classes {
        let largest = PAGE_SIZE - 1 + HEADER_BYTES;
        let mut classes: Vec<Class> = Vec::new();
        let mut by_grains = vec![0];
        for grains in 1..=largest.div_ceil(GRAIN_BYTES) {
            let slot_bytes = (grains * GRAIN_BYTES).max(SLOT_BYTES_MIN);
            if classes
                .last()
                .is_none_or(|last| usize::from(last.slot_bytes) < slot_bytes)
            {
                classes.push(Class::for_size(slot_bytes));
            }
            by_grains.push((classes.len() - 1) as u8);
        }
        classes.push(Class::RAW);
        assert!(classes.len() <= usize::from(u8::MAX));
        Classes { classes, by_grains }
    }

    pub(crate) fn len(&self) -> usize {
        self.classes.len()
    }

    pub(crate) fn get(&self, nr: u8) -> Class {
        self.classes[usize::from(nr)]
    }

    /// Returns the number of the class for `len` bytes. `len` is between 1 and the size of a page.
    pub(crate) fn for_len(&self, len: usize) -> u8 {
        if len == PAGE_SIZE {
            return (self.classes.len() - 1) as u8;
        }
        self.by_grains[(len + HEADER_BYTES).div_ceil(GRAIN_BYTES)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::ENCODED_BYTES_MAX;

    #[test]
    fn size_classes_fit_each_length_with_little_waste() {
        let classes = Classes::new();
        println!("{} size classes", classes.len());
        for len in 1..=PAGE_SIZE {
            let class = classes.get(classes.for_len(len));
            assert!(
                class.payload_max() >= len,
                "a blob of {len} B does not fit into a slot of its size class {class:?}"
            );
            let span = usize::from(class.frames) * FRAME_BYTES;
            assert!(usize::from(class.slots) * usize::from(class.slot_bytes) <= span);
            assert!(usize::from(class.slots) <= SLOTS_MAX);
            // From 512 B on, a slot is at most a sixth longer than its bytes. Shorter lengths are not
            // checked: the header and the rounding to 16 B take a larger part of their slots, and the
            // smallest slot has 128 B.
            if len >= 512 {
                let held = span as f64 / f64::from(class.slots);
                assert!(
                    len as f64 / held > 0.86,
                    "a blob of {len} B fills 86 % or less of a slot of its size class {class:?}"
                );
            }
        }
    }

    /// The charge of a page includes 112 B for the part of its slot that its blob does not use
    /// (`PAGE_METADATA_CHARGE_BYTES`). lz4 makes no form of a page shorter than 16 B.
    #[test]
    fn a_slot_is_at_most_112_bytes_longer_than_its_blob() {
        let classes = Classes::new();
        for len in 16..=ENCODED_BYTES_MAX {
            let class = classes.get(classes.for_len(len));
            let span = usize::from(class.frames) * FRAME_BYTES;
            let slot = span.div_ceil(usize::from(class.slots));
            assert!(
                slot - len <= 112,
                "a blob of {len} B takes {slot} B of a span of its size class {class:?}"
            );
        }
    }
}
