// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Faults in values: well-formed chains with a wrong value in a field of the request.

use super::*;

/// Returns the faults whose chains are well-formed and have a wrong value in a field. The driver
/// has not accepted `VIRTIO_TMEM_F_RETAIN`.
pub(super) fn all() -> Vec<Fault> {
    let mut out = Vec::new();
    let requests: [(&str, Make); 8] = [
        ("put", put),
        ("get", get),
        ("flush", flush),
        ("create", create),
        ("destroy", destroy),
        ("report", report),
        ("latencies", latencies),
        ("generation", generation),
    ];
    for (name, make) in requests {
        for unknown in [0u16, 4, 15, 21, u16::MAX] {
            out.push(bent(
                format!("{name} with the unknown request type {unknown}"),
                UNSUPPORTED,
                make,
                move |e| e.patch(TYPE, &unknown.to_le_bytes()),
            ));
        }
        for bit in [0u64, 1, 63] {
            out.push(bent(
                format!("{name} with bit {bit} of req.retain set"),
                BAD,
                make,
                move |e| e.patch(RETAIN, &(1u64 << bit).to_le_bytes()),
            ));
        }
        // The device ignores the generation that a GENERATION carries.
        let has_generation = name != "generation";
        for generation in [0, 1, u64::MAX].into_iter().filter(|_| has_generation) {
            out.push(bent(
                format!("{name} with the wrong generation {generation}"),
                STALE,
                make,
                move |e| e.patch(GENERATION, &generation.to_le_bytes()),
            ));
        }
        for flip in [0, 31, 32, 63].into_iter().filter(|_| has_generation) {
            out.push(bent(
                format!("{name} with bit {flip} of the generation flipped"),
                STALE,
                make,
                move |mut e| {
                    e.meta[flip / 8] ^= 1 << (flip % 8);
                    e
                },
            ));
        }
        let control = !matches!(name, "put" | "get" | "flush");
        let count = if control { 0u16 } else { 2 };
        for wrong in [0, 1, 3, 64, 65, u16::MAX]
            .into_iter()
            .filter(|&w| w != count)
        {
            out.push(bent(
                format!("{name} with the count {wrong} instead of {count}"),
                BAD,
                make,
                move |e| e.patch(COUNT, &wrong.to_le_bytes()),
            ));
        }
        let has_pool = !matches!(name, "report" | "latencies" | "generation");
        if has_pool {
            out.push(bent(format!("{name} of pool 0"), BAD, make, |e| {
                e.patch(POOL, &[0; 4])
            }));
        }
        if has_pool && name != "create" {
            out.push(bent(
                format!("{name} of a pool that does not exist"),
                NO_POOL,
                make,
                |e| e.patch(POOL, &u32::MAX.to_le_bytes()),
            ));
        }
        let other = move |g: &mut FakeGuest, t: Target| {
            let request = make(t);
            let encoded = request.encode(g.generation());
            let queue = if control {
                t.queue
            } else {
                wire::CONTROL_QUEUE
            };
            send_encoded(g, queue, request, &encoded)
        };
        let name = format!("{name} on the wrong queue");
        out.push(Fault {
            name,
            expect: BAD,
            send: Box::new(other),
        });
    }
    out.push(bent("ref without the feature", UNSUPPORTED, refer, |e| e));
    let second = BODY + PUT_PAGE_BYTES;
    let end = 1u64 << wire::INDEX_BITS;
    let index_end = end.to_le_bytes();
    let max = u64::MAX.to_le_bytes();
    // Write a wrong value into the second page or range of a request. The device must not execute
    // the request for the first page or range either, although that one is correct.
    out.push(bent("put of object 0", BAD, put, move |e| {
        e.patch(second, &[0; 8])
    }));
    out.push(bent("put of index 2^51", BAD, put, move |e| {
        e.patch(second + 8, &index_end)
    }));
    out.push(bent("put of index 2^64 - 1", BAD, put, move |e| {
        e.patch(second + 8, &max)
    }));
    out.push(bent("put of cookie 0", BAD, put, move |e| {
        e.patch(second + 16, &[0; 8])
    }));
    out.push(bent("put with flag 2", UNSUPPORTED, put, move |e| {
        e.patch(second + 24, &[2])
    }));
    out.push(bent("put with flag 2^31", UNSUPPORTED, put, move |e| {
        e.patch(second + 27, &[128])
    }));
    out.push(bent("put with reserved", BAD, put, move |e| {
        e.patch(second + 28, &[1])
    }));
    out.push(bent("get of object 0", BAD, get, |e| {
        e.patch(BODY, &[0; 8])
    }));
    out.push(bent("get of index 2^51", BAD, get, move |e| {
        e.patch(BODY + 8, &index_end)
    }));
    let last = (end - 1).to_le_bytes();
    out.push(bent("get that runs beyond 2^51", BAD, get, move |e| {
        e.patch(BODY + 8, &last)
    }));
    out.push(bent("get that overflows", BAD, get, move |e| {
        e.patch(BODY + 8, &max)
    }));
    out.push(bent("flush of object 0", BAD, flush, |e| {
        e.patch(BODY + 24, &[0; 8])
    }));
    out.push(bent("flush of index 2^51", BAD, flush, move |e| {
        e.patch(BODY + 24 + 8, &index_end)
    }));
    // The sum of index and length of the first two would be 0 and 1 in 64 bits.
    for (index, nr_pages) in [(1, u64::MAX), (3, u64::MAX - 1), (end - 1, 2), (0, end + 1)] {
        out.push(bent(
            format!("flush of {nr_pages} pages from index {index}"),
            BAD,
            flush,
            move |e| {
                e.patch(BODY + 24 + 8, &index.to_le_bytes())
                    .patch(BODY + 24 + 16, &nr_pages.to_le_bytes())
            },
        ));
    }
    let unknown_state = (wire::R_POISONED + 1).to_le_bytes();
    out.push(bent("report of an unknown state", BAD, report, move |e| {
        e.patch(BODY + 4, &unknown_state)
    }));
    out.push(bent("create with flag 2", UNSUPPORTED, create, |e| {
        e.patch(BODY, &[2])
    }));
    out.push(bent("create with flag 2^31", UNSUPPORTED, create, |e| {
        e.patch(BODY + 3, &[128])
    }));
    out.push(bent("create with reserved", BAD, create, |e| {
        e.patch(BODY + 4, &[1])
    }));
    out
}

/// Returns the faults with retained pages whose chains are well-formed and have a wrong value in a
/// field.
pub(super) fn retained_page_faults() -> Vec<Fault> {
    let mut out = Vec::new();
    // Set bits of `retain` beyond the pages of the request: a get of two pages may set only bits 0
    // and 1.
    for bit in [2, 31, 32, 63] {
        let bits = 0b11 | 1u64 << bit;
        out.push(bent(
            format!("get of 2 pages with bit {bit} of req.retain set"),
            BAD,
            get,
            move |e| e.patch(RETAIN, &bits.to_le_bytes()),
        ));
    }
    let others: [(&str, Make); 7] = [
        ("put", put),
        ("flush", flush),
        ("ref", refer),
        ("create", create),
        ("destroy", destroy),
        ("report", report),
        ("latencies", latencies),
    ];
    for (name, make) in others {
        out.push(bent(
            format!("{name} with bit 0 of req.retain set"),
            BAD,
            make,
            |e| e.patch(RETAIN, &[1]),
        ));
    }
    for (name, make) in others.into_iter().filter(|(name, _)| *name != "ref") {
        out.push(bent(
            format!("{name} with the request type of a ref"),
            BAD,
            make,
            |e| e.patch(TYPE, &wire::T_REF.to_le_bytes()),
        ));
    }
    for wrong in [0, 1, 3, 64, 65, u16::MAX] {
        out.push(bent(
            format!("ref with the count {wrong} instead of 2"),
            BAD,
            refer,
            move |e| e.patch(COUNT, &wrong.to_le_bytes()),
        ));
    }
    for generation in [0, 1, u64::MAX] {
        out.push(bent(
            format!("ref with the wrong generation {generation}"),
            STALE,
            refer,
            move |e| e.patch(GENERATION, &generation.to_le_bytes()),
        ));
    }
    out.push(bent("ref of pool 0", BAD, refer, |e| {
        e.patch(POOL, &[0; 4])
    }));
    out.push(bent("ref of no live pool", NO_POOL, refer, |e| {
        e.patch(POOL, &u32::MAX.to_le_bytes())
    }));
    out.push(Fault {
        name: "ref on the control queue".into(),
        expect: BAD,
        send: Box::new(|g, t| {
            let request = refer(t);
            let encoded = request.encode(g.generation());
            send_encoded(g, wire::CONTROL_QUEUE, request, &encoded)
        }),
    });
    let second = BODY + REF_PAGE_BYTES;
    let index_end = 1u64 << wire::INDEX_BITS;
    for (name, at, value) in [
        ("ref of object 0", second, 0),
        ("ref of index 2^51", second + 8, index_end),
        ("ref of index 2^64 - 1", second + 8, u64::MAX),
        ("ref of cookie 0", second + 16, 0),
    ] {
        out.push(bent(name, BAD, refer, move |e| {
            e.patch(at, &value.to_le_bytes())
        }));
    }
    out
}
