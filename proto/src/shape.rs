// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The exact size of a request and of its answer, by type and count (SPEC.md, "Requests").

use crate::*;

/// Sizes in bytes of the two parts of a request's descriptor chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Size in bytes of the part that the device reads.
    pub readable_bytes: usize,
    /// Size in bytes of the part that the device writes.
    pub writable_bytes: usize,
}

/// Size in bytes of the largest readable part, which is that of a PUT of [`BATCH_MAX`] pages.
pub const READABLE_BYTES_MAX: usize =
    size_of::<Req>() + BATCH_MAX * (size_of::<PutPage>() + PAGE_SIZE);

/// Size in bytes of the largest writable part, which is the answer to a GET of [`BATCH_MAX`] pages.
pub const WRITABLE_BYTES_MAX: usize =
    size_of::<Resp>() + BATCH_MAX * (size_of::<GetPage>() + PAGE_SIZE);

/// Returns the bits that may be set in the field [`Req::retain`] of a GET of `count` pages.
pub const fn retain_bits(count: u16) -> u64 {
    match count {
        0 => 0,
        count => u64::MAX >> (BATCH_MAX as u32).saturating_sub(count as u32),
    }
}

// Check that [`Req::retain`] has a bit for each page of the largest batch.
const _: () = assert!(BATCH_MAX == u64::BITS as usize);

/// Returns the sizes of a request with this type and count. Returns None if the type is unknown or
/// does not allow this count.
pub const fn shape(request_type: u16, count: u16) -> Option<Shape> {
    let count = count as usize;
    let batch = matches!(request_type, T_PUT | T_GET | T_FLUSH | T_REF);
    if (batch && (count == 0 || count > BATCH_MAX)) || (!batch && count != 0) {
        return None;
    }
    let (body, results) = match request_type {
        T_PUT => (count * (size_of::<PutPage>() + PAGE_SIZE), count),
        T_GET => (
            size_of::<Get>() + count * size_of::<U64>(),
            count * (size_of::<GetPage>() + PAGE_SIZE),
        ),
        T_FLUSH => (count * size_of::<Range>(), 0),
        T_REF => (count * size_of::<RefPage>(), count),
        T_POOL_CREATE => (size_of::<PoolCreate>(), 0),
        T_POOL_DESTROY => (0, 0),
        T_REPORT => (size_of::<Report>(), 0),
        T_LATENCIES => (size_of::<Latencies>(), 0),
        T_GENERATION => (0, size_of::<Generation>()),
        _ => return None,
    };
    Some(Shape {
        readable_bytes: size_of::<Req>() + body,
        writable_bytes: size_of::<Resp>() + results,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_shapes_match_the_specification() {
        let bytes = |t, n| shape(t, n).map(|s| (s.readable_bytes, s.writable_bytes));
        assert_eq!(bytes(T_PUT, 1), Some((24 + 32 + 4096, 8 + 1)));
        assert_eq!(bytes(T_GET, 2), Some((24 + 16 + 16, 8 + 32 + 8192)));
        assert_eq!(bytes(T_FLUSH, 3), Some((24 + 72, 8)));
        assert_eq!(bytes(T_REF, 3), Some((24 + 72, 8 + 3)));
        assert_eq!(bytes(T_POOL_CREATE, 0), Some((32, 8)));
        assert_eq!(bytes(T_POOL_DESTROY, 0), Some((24, 8)));
        assert_eq!(bytes(T_REPORT, 0), Some((24 + 152, 8)));
        assert_eq!(bytes(T_LATENCIES, 0), Some((24 + 136, 8)));
        assert_eq!(bytes(T_GENERATION, 0), Some((24, 8 + 8)));
    }

    #[test]
    fn counts_and_types_out_of_range_have_no_shape() {
        for t in [T_PUT, T_GET, T_FLUSH, T_REF] {
            assert_eq!(shape(t, 0), None);
            assert!(shape(t, BATCH_MAX as u16).is_some());
            assert_eq!(shape(t, BATCH_MAX as u16 + 1), None);
        }
        for t in T_POOL_CREATE..=T_GENERATION {
            assert_eq!(shape(t, 1), None);
        }
        assert_eq!(shape(0, 0), None);
        assert_eq!(shape(21, 0), None);
    }

    #[test]
    fn retain_has_a_bit_for_each_page_of_a_get() {
        let bits = [0, 1, 2, 63, 64].map(retain_bits);
        assert_eq!(bits, [0, 1, 3, u64::MAX >> 1, u64::MAX]);
    }

    #[test]
    fn size_constants_equal_the_largest_requests() {
        let all = (0..=u8::MAX as u16).flat_map(|t| (0..100).filter_map(move |n| shape(t, n)));
        let (mut readable, mut writable) = (0, 0);
        for s in all {
            readable = readable.max(s.readable_bytes);
            writable = writable.max(s.writable_bytes);
        }
        assert_eq!(
            (readable, writable),
            (READABLE_BYTES_MAX, WRITABLE_BYTES_MAX)
        );
    }
}
