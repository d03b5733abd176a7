// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Wire format between a virtio-tmem driver and device: layouts, values and limits.
//!
//! `virtio_tmem.h` defines the format. This crate repeats it for Rust, and a test compares every
//! size, offset and value of both files, in both directions. SPEC.md has the rules for requests.
//! All integers are little-endian. No struct has padding or an alignment above 1, so a request can
//! be read in place from any byte buffer.
//!
//! Out of scope: code that executes a request. This crate only describes the bytes.
#![no_std]
#![forbid(unsafe_code)]

#[cfg(test)]
extern crate std;

#[cfg(test)]
mod header_test;
mod shape;

pub use shape::{READABLE_BYTES_MAX, Shape, WRITABLE_BYTES_MAX, retain_bits, shape};
pub use zerocopy::little_endian::{U16, U32, U64};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Defines the constants and, for `header_test`, a table of them with their C names.
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

/// Defines the wire structs and, for `header_test`, a table of their layouts with their C names.
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
    /// Virtio device id. The number is experimental until one is assigned.
    "VIRTIO_ID_TMEM" ID: u32 = 63;

    /// Reserved feature bit for pools that must not lose pages; never offered.
    "VIRTIO_TMEM_F_PERSISTENT" F_PERSISTENT: u32 = 0;
    /// Reserved feature bit for pools that several guests share; never offered.
    "VIRTIO_TMEM_F_SHARED" F_SHARED: u32 = 1;
    /// Reserved feature bit for a queue of events from device to driver; never offered.
    "VIRTIO_TMEM_F_EVENTS" F_EVENTS: u32 = 3;

    /// Feature bit: a GET may leave pages in the pool, and the device supports the [`T_REF`]
    /// request.
    "VIRTIO_TMEM_F_RETAIN" F_RETAIN: u32 = 2;
    /// Feature bit: the device supports the [`T_LATENCIES`] request.
    "VIRTIO_TMEM_F_LATENCIES" F_LATENCIES: u32 = 4;
    /// Feature bit: the user of the device wants swap areas of the guest to be cached.
    "VIRTIO_TMEM_F_SWAP" F_SWAP: u32 = 5;

    /// log2 of [`PAGE_SIZE`].
    "VIRTIO_TMEM_PAGE_SHIFT" PAGE_SHIFT: u32 = 12;
    /// Page size in bytes, the only page size of this implementation.
    "VIRTIO_TMEM_PAGE_SIZE" PAGE_SIZE: usize = 4096;
    /// Maximum number of pages or ranges in a request.
    "VIRTIO_TMEM_BATCH_MAX" BATCH_MAX: usize = 64;
    /// Maximum number of request queues. The control queue is not counted.
    "VIRTIO_TMEM_REQUEST_QUEUES_MAX" REQUEST_QUEUES_MAX: usize = 16;
    /// Maximum number of descriptors of a queue.
    "VIRTIO_TMEM_QUEUE_SIZE_MAX" QUEUE_SIZE_MAX: u16 = 1024;
    /// log2 of the number of pages in a chunk (1 MiB). All requests for a chunk use one queue.
    "VIRTIO_TMEM_CHUNK_SHIFT" CHUNK_SHIFT: u32 = 8;
    /// Number of bits of a page index. The largest file has 2^63 bytes, which are 2^51 pages.
    "VIRTIO_TMEM_INDEX_BITS" INDEX_BITS: u32 = 51;
    /// Maximum number of pools that exist at the same time on a device.
    "VIRTIO_TMEM_POOLS_MAX" POOLS_MAX: usize = 256;

    /// Number of the control queue. The request queues have the numbers from 1 on.
    "VIRTIO_TMEM_CONTROL_QUEUE" CONTROL_QUEUE: usize = 0;

    /// Request type (request queue): put a batch of pages.
    "VIRTIO_TMEM_T_PUT" T_PUT: u16 = 1;
    /// Request type (request queue): get a run of adjacent pages of one object.
    "VIRTIO_TMEM_T_GET" T_GET: u16 = 2;
    /// Request type (request queue): drop the pages of ranges of objects.
    "VIRTIO_TMEM_T_FLUSH" T_FLUSH: u16 = 3;
    /// Request type (request queue): the guest has evicted retained pages, and they are unchanged.
    "VIRTIO_TMEM_T_REF" T_REF: u16 = 4;
    /// Request type (control queue): create a pool.
    "VIRTIO_TMEM_T_POOL_CREATE" T_POOL_CREATE: u16 = 16;
    /// Request type (control queue): destroy a pool and its pages.
    "VIRTIO_TMEM_T_POOL_DESTROY" T_POOL_DESTROY: u16 = 17;
    /// Request type (control queue): report the driver's state and counters.
    "VIRTIO_TMEM_T_REPORT" T_REPORT: u16 = 18;
    /// Request type (control queue): report how long readers in the guest waited.
    "VIRTIO_TMEM_T_LATENCIES" T_LATENCIES: u16 = 19;
    /// Request type (control queue): return the device's current generation.
    "VIRTIO_TMEM_T_GENERATION" T_GENERATION: u16 = 20;

    /// Status: the request was executed. Each page has its own result.
    "VIRTIO_TMEM_S_OK" S_OK: u8 = 1;
    /// Status: the request carries a generation that is not the present one. The device changed
    /// nothing.
    "VIRTIO_TMEM_S_STALE" S_STALE: u8 = 2;
    /// Status: the lengths of the request are wrong, or a value is out of range.
    "VIRTIO_TMEM_S_BAD" S_BAD: u8 = 3;
    /// Status: the type or a flag of the request is unknown.
    "VIRTIO_TMEM_S_UNSUPPORTED" S_UNSUPPORTED: u8 = 4;
    /// Status: the driver has no such pool in this generation.
    "VIRTIO_TMEM_S_NO_POOL" S_NO_POOL: u8 = 5;
    /// Status: a limit of the host is reached.
    "VIRTIO_TMEM_S_LIMIT" S_LIMIT: u8 = 6;
    /// Value that the driver writes to each status and page result before it sends a request. The
    /// device never sends this value.
    "VIRTIO_TMEM_S_UNANSWERED" S_UNANSWERED: u8 = 255;

    /// Result for a page of a PUT: the device has stored the page.
    "VIRTIO_TMEM_P_STORED" P_STORED: u8 = 65;
    /// Result for a page of a PUT: the device did not store the page. It has no page with this key
    /// now.
    "VIRTIO_TMEM_P_REFUSED" P_REFUSED: u8 = 66;
    /// Result for a page of a GET: the page is returned. The device no longer has it, unless the
    /// answer has the flag [`GET_RETAINED`].
    "VIRTIO_TMEM_P_HIT" P_HIT: u8 = 67;
    /// Result for a page of a GET: the page is not returned.
    "VIRTIO_TMEM_P_MISS" P_MISS: u8 = 68;
    /// Result for a page of a REF: the device has the page and keeps it.
    "VIRTIO_TMEM_P_HELD" P_HELD: u8 = 69;
    /// Result for a page of a REF: the device has no page with this key and cookie.
    "VIRTIO_TMEM_P_GONE" P_GONE: u8 = 70;

    /// Flag of [`PutPage`]: the page was active in the guest.
    "VIRTIO_TMEM_PUT_WORKINGSET" PUT_WORKINGSET: u32 = 1;

    /// Flag of [`GetPage`]: the device retains the page that it returned.
    "VIRTIO_TMEM_GET_RETAINED" GET_RETAINED: u8 = 1;

    /// Flag of [`PoolCreate`]: the device never shares pages of the pool with other drivers.
    "VIRTIO_TMEM_POOL_PRIVATE" POOL_PRIVATE: u32 = 1;

    /// Value of [`Range::nr_pages`] that stands for all pages from the index to the end of the
    /// object.
    "VIRTIO_TMEM_TO_END" TO_END: u64 = 0;

    /// [`Report::state`]: the driver is loaded and stays off.
    "VIRTIO_TMEM_R_OFF" R_OFF: u32 = 0;
    /// [`Report::state`]: the driver is on and caches pages.
    "VIRTIO_TMEM_R_ON" R_ON: u32 = 1;
    /// [`Report::state`]: the driver is on, but the device has no back end.
    "VIRTIO_TMEM_R_OFFLINE" R_OFFLINE: u32 = 2;
    /// [`Report::state`]: answers were late, so the driver's circuit breaker is open and stops
    /// gets.
    "VIRTIO_TMEM_R_TRIPPED" R_TRIPPED: u32 = 3;
    /// [`Report::state`]: a page failed a check, so the driver is off until it is loaded again.
    "VIRTIO_TMEM_R_POISONED" R_POISONED: u32 = 4;

    /// Bit of [`Report::hooks`]: the driver caches pages of f2fs file systems.
    "VIRTIO_TMEM_H_F2FS" H_F2FS: u32 = 55;
    /// Bit of [`Report::hooks`]: the driver caches pages of ext4 file systems.
    "VIRTIO_TMEM_H_EXT4" H_EXT4: u32 = 56;
    /// Bit of [`Report::hooks`]: the driver caches pages of xfs file systems.
    "VIRTIO_TMEM_H_XFS" H_XFS: u32 = 57;
    /// Bit of [`Report::hooks`]: the driver caches pages of ext2 file systems.
    "VIRTIO_TMEM_H_EXT2" H_EXT2: u32 = 58;
    /// Bit of [`Report::hooks`]: the driver caches pages of ext3 file systems.
    "VIRTIO_TMEM_H_EXT3" H_EXT3: u32 = 59;
    /// Bit of [`Report::hooks`]: the driver caches pages of vfat file systems.
    "VIRTIO_TMEM_H_VFAT" H_VFAT: u32 = 60;
    /// Bit of [`Report::hooks`]: the driver caches pages of exfat file systems.
    "VIRTIO_TMEM_H_EXFAT" H_EXFAT: u32 = 61;
    /// Bit of [`Report::hooks`]: the driver caches pages of erofs file systems.
    "VIRTIO_TMEM_H_EROFS" H_EROFS: u32 = 62;
    /// Bit of [`Report::hooks`]: the driver caches pages of btrfs file systems.
    "VIRTIO_TMEM_H_BTRFS" H_BTRFS: u32 = 63;
}

structs! {
    /// Device configuration, read-only for the driver.
    "virtio_tmem_config" Config {
        /// Generation that each request carries. 0 means that there is no back end, or that the front
        /// end does not know the generation; the driver then sends only [`T_GENERATION`] requests.
        generation: U64,
        /// Page size in bytes, [`PAGE_SIZE`].
        page_size: U32,
        /// Number of request queues, 1 to [`REQUEST_QUEUES_MAX`].
        num_request_queues: U16,
        /// Maximum number of pages or ranges in a request, 1 to [`BATCH_MAX`].
        batch_max: U16,
        /// Maximum number of pools that exist at the same time, 1 to [`POOLS_MAX`].
        pools_max: U32,
        /// Reserved; 0. The driver ignores it.
        reserved: [U32; 3],
    }

    /// Header of every request, readable by the device.
    "virtio_tmem_req" Req {
        /// Generation that the device has told the driver. The device ignores it in a
        /// [`T_GENERATION`] request.
        generation: U64,
        /// Type of the request: one of the `T_...` constants.
        r#type: U16,
        /// Number of pages or ranges in the request; 0 for requests on the control queue.
        count: U16,
        /// Id of the request's pool, which the driver has chosen; 0 if the request concerns no
        /// pool.
        pool: U32,
        /// In a GET with [`F_RETAIN`], bit n allows the device to retain the page index + n. All
        /// other bits are 0, and the field is 0 in all other requests.
        retain: U64,
    }

    /// Header of every answer, writable by the device.
    "virtio_tmem_resp" Resp {
        /// Status of the request: one of the `S_...` constants.
        status: u8,
        /// Reserved; 0.
        reserved: [u8; 7],
    }

    /// Page of a PUT. The request is [`Req`], `[PutPage; count]` and the data of `count` pages. The
    /// answer is [`Resp`] and, for each page, a byte with a `P_...` constant.
    "virtio_tmem_put_page" PutPage {
        /// Number of the object, which the driver has chosen; never 0.
        object: U64,
        /// Page index within the object, below 2^[`INDEX_BITS`].
        index: U64,
        /// Cookie, which is stored with the page; never 0.
        cookie: U64,
        /// Flags of the page: the `PUT_...` constants.
        flags: U32,
        /// Reserved; 0.
        reserved: U32,
    }

    /// Body of a GET, which requests the pages index to index + count - 1 of one object. The
    /// request is [`Req`], [`Get`] and `cookie: [U64; count]`. The answer is [`Resp`],
    /// `[GetPage; count]` and space for the data of `count` pages.
    "virtio_tmem_get" Get {
        /// Number of the object, which the driver has chosen; never 0.
        object: U64,
        /// Page index of the first requested page.
        index: U64,
    }

    /// Answer for a page of a GET.
    "virtio_tmem_get_page" GetPage {
        /// Cookie of the page that is returned; 0 for a miss.
        cookie: U64,
        /// Result for the page: one of the `P_...` constants.
        result: u8,
        /// Flags of the page: the `GET_...` constants.
        flags: u8,
        /// Reserved; 0.
        reserved: [u8; 6],
    }

    /// Range of a FLUSH. The request is [`Req`] and `[Range; count]`, the answer [`Resp`].
    "virtio_tmem_range" Range {
        /// Number of the object, which the driver has chosen; never 0.
        object: U64,
        /// Page index of the first page in the range.
        index: U64,
        /// Number of pages in the range, or [`TO_END`].
        nr_pages: U64,
    }

    /// Page of a REF. The request is [`Req`] and `[RefPage; count]`. The answer is [`Resp`] and,
    /// for each page, a byte with a `P_...` constant. A driver sends a REF only with [`F_RETAIN`].
    "virtio_tmem_ref_page" RefPage {
        /// Number of the object, which the driver has chosen; never 0.
        object: U64,
        /// Page index within the object, below 2^[`INDEX_BITS`].
        index: U64,
        /// Cookie with which the page was put; never 0.
        cookie: U64,
    }

    /// Body of a POOL_CREATE. The request is [`Req`] and [`PoolCreate`], the answer [`Resp`]. A
    /// POOL_DESTROY has no body: its request is [`Req`].
    "virtio_tmem_pool_create" PoolCreate {
        /// Flags of the pool, such as [`POOL_PRIVATE`]. The device answers an unknown flag with
        /// [`S_UNSUPPORTED`].
        flags: U32,
        /// Reserved; 0.
        reserved: U32,
    }

    /// Body of a REPORT, the driver's statistics. The host uses it for statistics only. The request
    /// is [`Req`] and [`Report`], the answer [`Resp`].
    "virtio_tmem_report" Report {
        /// Version of the driver: major << 16 | minor << 8 | patch.
        version: U32,
        /// State of the driver: one of the `R_...` constants.
        state: U32,
        /// A bit for each of the driver's kernel hooks that is live, and the `H_...` bits.
        hooks: U64,
        /// Bytes of guest memory that the driver uses.
        memory_bytes: U64,
        /// Number of entries in the driver's index: pages that the device may hold.
        index_pages: U64,
        /// Number of pages that the driver accepted into its put ring.
        puts: U64,
        /// Number of eligible pages that the driver dropped instead of putting them, for example
        /// because its put ring was full or it had no memory.
        puts_dropped: U64,
        /// Number of pages that readers requested from the driver.
        gets: U64,
        /// Number of requested pages that the driver found in its put ring or got from the device,
        /// and used.
        hits: U64,
        /// Number of GET requests that were not answered by their deadline.
        late: U64,
        /// Number of pages that failed a check; must be 0.
        mismatches: U64,
        /// Number of index entries that the driver erased, for any reason.
        invalidations: U64,
        /// Release of the guest's kernel: any bytes, padded with NUL.
        kernel: [u8; 64],
    }

    /// Body of a LATENCIES: how long readers in the guest waited. The host uses it for statistics
    /// only. The request is [`Req`] and [`Latencies`], the answer [`Resp`]. A driver sends a
    /// LATENCIES only if the device offers [`F_LATENCIES`].
    "virtio_tmem_latencies" Latencies {
        /// Sum of the times that readers waited for GET requests, in nanoseconds.
        get_ns: U64,
        /// Numbers of GET requests by the time that their readers waited: less than 1 µs, less than
        /// 2, 4, … 16,384 µs, and longer.
        get: [U64; 16],
    }

    /// Answer to a GENERATION, after [`Resp`]. The request is only [`Req`]. The device answers it
    /// whatever generation the request carries.
    "virtio_tmem_generation" Generation {
        /// Current generation of the device; never 0 with [`S_OK`].
        generation: U64,
    }
}
