// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The wire between a virtio-tmem driver and device: layouts, values and limits.
//!
//! `virtio_tmem.h` is the source; this crate repeats it for Rust, and a test compares every size,
//! offset and value of the two, in both directions. The rules that go with the layouts are in
//! SPEC.md. All integers are little-endian. No struct has padding, and none has an alignment: a
//! request can be read in place from any byte buffer.
//!
//! Never here: code that acts on a request. This crate only says what the bytes are.
#![no_std]
#![forbid(unsafe_code)]

#[cfg(test)]
extern crate std;

#[cfg(test)]
mod header_test;
mod shape;

pub use shape::{READABLE_BYTES_MAX, Shape, WRITABLE_BYTES_MAX, shape};
pub use zerocopy::little_endian::{U16, U32, U64};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Defines the constants, and for the test a table of them under their C names.
macro_rules! constants {
    ($($(#[$meta:meta])* $c_name:literal $name:ident: $type:ty = $value:expr;)*) => {
        $(
            $(#[$meta])*
            #[doc(alias = $c_name)]
            pub const $name: $type = $value;
        )*
        #[cfg(test)]
        pub(crate) const DEFINES: &[(&str, u64)] = &[$(($c_name, $name as u64)),*];
    };
}

/// Defines the wire structs, and for the test a table of their layouts under their C names.
macro_rules! structs {
    ($(
        $(#[$meta:meta])*
        $c_name:literal $name:ident {
            $($(#[$field_meta:meta])* $field:ident: $type:ty,)*
        }
    )*) => {
        $(
            $(#[$meta])*
            #[doc(alias = $c_name)]
            #[derive(
                Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
                Unaligned,
            )]
            #[repr(C)]
            pub struct $name {
                $($(#[$field_meta])* pub $field: $type,)*
            }
        )*
        #[cfg(test)]
        pub(crate) const STRUCTS: &[header_test::Struct] = &[$(
            header_test::Struct {
                c_name: $c_name,
                size: size_of::<$name>(),
                fields: &[$(
                    header_test::Field {
                        name: stringify!($field),
                        offset: core::mem::offset_of!($name, $field),
                        size: size_of::<$type>(),
                        rust_type: stringify!($type),
                    }
                ),*],
            }
        ),*];
    };
}

constants! {
    /// Virtio device id: experimental until one is assigned.
    "VIRTIO_ID_TMEM" ID: u32 = 63;

    /// Reserved feature bit: pools that may not lose pages.
    "VIRTIO_TMEM_F_PERSISTENT" F_PERSISTENT: u32 = 0;
    /// Reserved feature bit: pools that several guests see.
    "VIRTIO_TMEM_F_SHARED" F_SHARED: u32 = 1;
    /// Reserved feature bit: a get that leaves the page.
    "VIRTIO_TMEM_F_RETAIN" F_RETAIN: u32 = 2;
    /// Reserved feature bit: a device-to-driver queue.
    "VIRTIO_TMEM_F_EVENTS" F_EVENTS: u32 = 3;

    /// Feature bit: the [`T_LATENCIES`] request.
    "VIRTIO_TMEM_F_LATENCIES" F_LATENCIES: u32 = 4;

    /// log2 of [`PAGE_SIZE`].
    "VIRTIO_TMEM_PAGE_SHIFT" PAGE_SHIFT: u32 = 12;
    /// Bytes of a page: the only size of this implementation.
    "VIRTIO_TMEM_PAGE_SIZE" PAGE_SIZE: usize = 4096;
    /// Pages or ranges of a request at most.
    "VIRTIO_TMEM_BATCH_MAX" BATCH_MAX: usize = 64;
    /// Request queues at most, beside the control queue.
    "VIRTIO_TMEM_REQUEST_QUEUES_MAX" REQUEST_QUEUES_MAX: usize = 16;
    /// Descriptors of a queue at most.
    "VIRTIO_TMEM_QUEUE_SIZE_MAX" QUEUE_SIZE_MAX: u16 = 1024;
    /// log2 of the pages of a chunk (1 MiB), whose requests all use one queue.
    "VIRTIO_TMEM_CHUNK_SHIFT" CHUNK_SHIFT: u32 = 8;
    /// An index is below 2 to this power: the largest file has 2^63 bytes.
    "VIRTIO_TMEM_INDEX_BITS" INDEX_BITS: u32 = 51;
    /// Live pools of a device at most.
    "VIRTIO_TMEM_POOLS_MAX" POOLS_MAX: usize = 256;

    /// Number of the control queue; request queues follow it.
    "VIRTIO_TMEM_CONTROL_QUEUE" CONTROL_QUEUE: usize = 0;

    /// Request type (request queue): put a batch of pages.
    "VIRTIO_TMEM_T_PUT" T_PUT: u16 = 1;
    /// Request type (request queue): get a run of pages of one object.
    "VIRTIO_TMEM_T_GET" T_GET: u16 = 2;
    /// Request type (request queue): drop ranges.
    "VIRTIO_TMEM_T_FLUSH" T_FLUSH: u16 = 3;
    /// Request type (control queue): create a pool.
    "VIRTIO_TMEM_T_POOL_CREATE" T_POOL_CREATE: u16 = 16;
    /// Request type (control queue): destroy a pool and its pages.
    "VIRTIO_TMEM_T_POOL_DESTROY" T_POOL_DESTROY: u16 = 17;
    /// Request type (control queue): the driver's counters.
    "VIRTIO_TMEM_T_REPORT" T_REPORT: u16 = 18;
    /// Request type (control queue): how long the driver's readers waited.
    "VIRTIO_TMEM_T_LATENCIES" T_LATENCIES: u16 = 19;

    /// Status: done; see the page results.
    "VIRTIO_TMEM_S_OK" S_OK: u8 = 1;
    /// Status: another generation; nothing touched.
    "VIRTIO_TMEM_S_STALE" S_STALE: u8 = 2;
    /// Status: odd shape or a value out of range.
    "VIRTIO_TMEM_S_BAD" S_BAD: u8 = 3;
    /// Status: unknown type or flag.
    "VIRTIO_TMEM_S_UNSUPPORTED" S_UNSUPPORTED: u8 = 4;
    /// Status: not a live pool of this driver.
    "VIRTIO_TMEM_S_NO_POOL" S_NO_POOL: u8 = 5;
    /// Status: a limit of the host is reached.
    "VIRTIO_TMEM_S_LIMIT" S_LIMIT: u8 = 6;
    /// Preset by the driver in every status and page result; never sent by the device.
    "VIRTIO_TMEM_S_UNANSWERED" S_UNANSWERED: u8 = 255;

    /// Result of a PUT page: held now.
    "VIRTIO_TMEM_P_STORED" P_STORED: u8 = 65;
    /// Result of a PUT page: not held, nor is anything else under its key.
    "VIRTIO_TMEM_P_REFUSED" P_REFUSED: u8 = 66;
    /// Result of a GET page: returned, and held no longer.
    "VIRTIO_TMEM_P_HIT" P_HIT: u8 = 67;
    /// Result of a GET page: not returned.
    "VIRTIO_TMEM_P_MISS" P_MISS: u8 = 68;

    /// Flag of [`PutPage`]: the page was active in the guest.
    "VIRTIO_TMEM_PUT_WORKINGSET" PUT_WORKINGSET: u32 = 1;

    /// [`Range::nr_pages`]: from the index to the end of the object.
    "VIRTIO_TMEM_TO_END" TO_END: u64 = 0;

    /// [`Report::state`]: loaded, stays off.
    "VIRTIO_TMEM_R_OFF" R_OFF: u32 = 0;
    /// [`Report::state`]: on.
    "VIRTIO_TMEM_R_ON" R_ON: u32 = 1;
    /// [`Report::state`]: on, but no backend.
    "VIRTIO_TMEM_R_OFFLINE" R_OFFLINE: u32 = 2;
    /// [`Report::state`]: breaker open, since answers were late.
    "VIRTIO_TMEM_R_TRIPPED" R_TRIPPED: u32 = 3;
    /// [`Report::state`]: a check failed; off until reload.
    "VIRTIO_TMEM_R_POISONED" R_POISONED: u32 = 4;

    /// Bit of [`Report::hooks`]: ext4 is served.
    "VIRTIO_TMEM_H_EXT4" H_EXT4: u32 = 56;
    /// Bit of [`Report::hooks`]: xfs is served.
    "VIRTIO_TMEM_H_XFS" H_XFS: u32 = 57;
}

structs! {
    /// Device configuration, read-only for the driver.
    "virtio_tmem_config" Config {
        /// The number that each request carries; 0: no backend, submit nothing.
        generation: U64,
        /// [`PAGE_SIZE`].
        page_size: U32,
        /// 1 to [`REQUEST_QUEUES_MAX`].
        num_request_queues: U16,
        /// 1 to [`BATCH_MAX`].
        batch_max: U16,
        /// 1 to [`POOLS_MAX`].
        pools_max: U32,
        /// 0; ignored by the driver.
        reserved: [U32; 3],
    }

    /// First in every request, readable.
    "virtio_tmem_req" Req {
        /// As read from the configuration.
        generation: U64,
        /// `T_...`
        r#type: U16,
        /// Pages or ranges; 0 for control requests.
        count: U16,
        /// The driver's own counter; 0 is no pool.
        pool: U32,
        /// 0
        reserved: U64,
    }

    /// First in every answer, writable.
    "virtio_tmem_resp" Resp {
        /// `S_...`
        status: u8,
        /// 0
        reserved: [u8; 7],
    }

    /// A page of a PUT, which is [`Req`], `[PutPage; count]`, page data `[count]`; answered by
    /// [`Resp`] and a byte `P_...` per page.
    "virtio_tmem_put_page" PutPage {
        /// The driver's own counter, never 0.
        object: U64,
        /// Page index within the object, below 2^[`INDEX_BITS`].
        index: U64,
        /// Never 0; stored with the page.
        cookie: U64,
        /// `PUT_...`
        flags: U32,
        /// 0
        reserved: U32,
    }

    /// A GET is [`Req`], [`Get`], `cookie: [U64; count]`, for the pages index to index + count - 1
    /// of one object; answered by [`Resp`], `[GetPage; count]`, page data `[count]`.
    "virtio_tmem_get" Get {
        /// The driver's own counter, never 0.
        object: U64,
        /// First page index.
        index: U64,
    }

    /// Answer for a page of a GET.
    "virtio_tmem_get_page" GetPage {
        /// Cookie of the page returned, 0 at a miss.
        cookie: U64,
        /// `P_...`
        result: u8,
        /// 0
        reserved: [u8; 7],
    }

    /// A range of a FLUSH, which is [`Req`], `[Range; count]`; answered by [`Resp`].
    "virtio_tmem_range" Range {
        /// The driver's own counter, never 0.
        object: U64,
        /// First page index.
        index: U64,
        /// Pages, or [`TO_END`].
        nr_pages: U64,
    }

    /// A POOL_CREATE is [`Req`], [`PoolCreate`]; answered by [`Resp`]. A POOL_DESTROY is [`Req`].
    "virtio_tmem_pool_create" PoolCreate {
        /// 0; any other is UNSUPPORTED.
        flags: U32,
        /// 0
        reserved: U32,
    }

    /// A REPORT is [`Req`], [`Report`]; answered by [`Resp`]. For the host's statistics only.
    "virtio_tmem_report" Report {
        /// major << 16 | minor << 8 | patch
        version: U32,
        /// `R_...`
        state: U32,
        /// A bit per hook that is live.
        hooks: U64,
        /// Bytes that the driver holds in the guest.
        memory_bytes: U64,
        /// Pages that the guest believes are held by the device.
        index_pages: U64,
        /// Pages accepted into the put ring.
        puts: U64,
        /// Eligible pages that were not accepted.
        puts_dropped: U64,
        /// Pages asked of the device.
        gets: U64,
        /// Pages that came back and were used.
        hits: U64,
        /// Requests that missed their deadline.
        late: U64,
        /// Pages that failed a check: must be 0.
        mismatches: U64,
        /// Index entries erased for coherence.
        invalidations: U64,
        /// Kernel release, NUL-padded, any bytes.
        kernel: [u8; 64],
    }

    /// A LATENCIES is [`Req`], [`Latencies`]; answered by [`Resp`]. For the host's statistics only.
    /// A driver sends it with [`F_LATENCIES`] only.
    "virtio_tmem_latencies" Latencies {
        /// All waits for GET requests together.
        get_ns: U64,
        /// GET requests by how long their readers waited: below 1 µs, below 2, 4, … 16,384 µs, and
        /// all others.
        get: [U64; 16],
    }
}
