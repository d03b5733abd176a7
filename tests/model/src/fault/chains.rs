// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Faults in descriptor chains: the device cannot follow the descriptors, or a buffer is outside of
//! guest memory.

use super::*;

/// Returns the faults in which the device cannot follow the descriptors of the chain, or in which a
/// buffer is outside of guest memory.
pub(super) fn all() -> Vec<Fault> {
    let stopped = Expect::Stopped;
    let descs = |p: &Placed| -> Vec<Desc> {
        let mut descs: Vec<Desc> = whole(p)
            .iter()
            .map(|b| Desc {
                addr: b.addr,
                len: b.len,
                flags: if b.writable { F_WRITE } else { 0 },
                next: 0,
            })
            .collect();
        link(&mut descs);
        descs
    };
    let indirect = |g: &FakeGuest, table: u64, inner: &[Desc]| -> Desc {
        for (i, d) in inner.iter().enumerate() {
            g.ram().write(table + i as u64 * DESC_BYTES, &d.to_bytes());
        }
        let len = (inner.len() as u64 * DESC_BYTES) as u32;
        Desc {
            addr: table,
            len,
            flags: F_INDIRECT,
            next: 0,
        }
    };
    let mut out = vec![
        raw(
            "descriptor that follows itself",
            stopped,
            put,
            move |_, _, p| {
                let mut d = descs(p);
                d[0].next = 0;
                d
            },
        ),
        raw(
            "last descriptor leads to the first",
            stopped,
            put,
            move |_, _, p| {
                let mut d = descs(p);
                let last = d
                    .last_mut()
                    .expect("the chain has no buffer for the answer");
                last.flags |= F_NEXT;
                last.next = 0;
                d
            },
        ),
        raw("next beyond the ring", stopped, put, move |_, _, p| {
            let mut d = descs(p);
            d[0].next = u16::MAX;
            d
        }),
        raw("indirect inside indirect", stopped, put, move |g, _, p| {
            let inner = indirect(g, p.table + 2048, &descs(p));
            vec![indirect(g, p.table, &[inner])]
        }),
        raw(
            "indirect table not of whole descriptors",
            stopped,
            put,
            move |g, _, p| {
                let mut d = indirect(g, p.table, &descs(p));
                d.len += 8;
                vec![d]
            },
        ),
        raw("empty indirect table", stopped, put, move |g, _, p| {
            let mut d = indirect(g, p.table, &descs(p));
            d.len = 0;
            vec![d]
        }),
        raw(
            "indirect table with a next",
            stopped,
            put,
            move |g, _, p| {
                let mut d = indirect(g, p.table, &descs(p));
                d.flags |= F_NEXT;
                d.next = 1;
                vec![
                    d,
                    Desc {
                        addr: p.table,
                        len: 8,
                        flags: F_WRITE,
                        next: 0,
                    },
                ]
            },
        ),
        raw(
            "next beyond the indirect table",
            stopped,
            put,
            move |g, _, p| {
                let mut inner = descs(p);
                inner[0].next = 200;
                vec![indirect(g, p.table, &inner)]
            },
        ),
        raw(
            "loop in the indirect table",
            stopped,
            put,
            move |g, _, p| {
                let mut inner = descs(p);
                inner[1].next = 0;
                vec![indirect(g, p.table, &inner)]
            },
        ),
        raw(
            "indirect table outside memory",
            stopped,
            put,
            move |_, _, _| {
                vec![Desc {
                    addr: HOLE,
                    len: 64,
                    flags: F_INDIRECT,
                    next: 0,
                }]
            },
        ),
        raw(
            "indirect table beyond 2^64",
            stopped,
            put,
            move |_, _, _| {
                vec![Desc {
                    addr: u64::MAX - 15,
                    len: 64,
                    flags: F_INDIRECT,
                    next: 0,
                }]
            },
        ),
        raw(
            "indirect table of 2^32 bytes",
            stopped,
            put,
            move |g, _, p| {
                let mut d = indirect(g, p.table, &descs(p));
                d.len = 0xffff_fff0;
                vec![d]
            },
        )
        .or(ANYTHING),
        raw(
            "chain longer than the ring",
            ANYTHING,
            put,
            move |g, _, p| {
                // Build an indirect table of 256 descriptors, which are more than the ring has.
                // Each readable descriptor has one byte, and the last descriptor is for the answer.
                let (addr, n) = p.readable[0];
                let mut inner: Vec<Desc> = (0..255)
                    .map(|i| Desc {
                        addr: addr + (i % n as u64),
                        len: 1,
                        flags: 0,
                        next: 0,
                    })
                    .collect();
                let (addr, n) = p.writable[0];
                inner.push(Desc {
                    addr,
                    len: n as u32,
                    flags: F_WRITE,
                    next: 0,
                });
                link(&mut inner);
                let table = g.ram().alloc(1);
                vec![indirect(g, table, &inner)]
            },
        ),
        raw("descriptor of length 0", ANYTHING, put, move |_, _, p| {
            let mut d = descs(p);
            d.insert(
                1,
                Desc {
                    addr: p.table,
                    len: 0,
                    flags: 0,
                    next: 0,
                },
            );
            link(&mut d);
            d
        }),
        rebuilt("request outside memory", BAD_OR_STOPPED, get, |_, p| {
            let mut b = whole(p);
            b[0].addr = HOLE;
            b
        }),
        rebuilt(
            "request that ends outside memory",
            BAD_OR_STOPPED,
            get,
            |_, p| {
                let mut b = whole(p);
                b[0].addr = (8 << 20) - 8;
                b
            },
        ),
        rebuilt("request beyond 2^64", BAD_OR_STOPPED, get, |_, p| {
            let mut b = whole(p);
            b[0].addr = u64::MAX - 7;
            b
        }),
        rebuilt("put: data outside memory", BAD_OR_STOPPED, put, |_, p| {
            let mut b = whole(p);
            b[1].addr = HOLE;
            b
        }),
        rebuilt("get: data outside memory", BAD_OR_STOPPED, get, |_, p| {
            let mut b = whole(p);
            b.last_mut()
                .expect("the chain of a get has no buffer for data")
                .addr = HOLE;
            b
        }),
        rebuilt(
            "get: data ends outside memory",
            BAD_OR_STOPPED,
            get,
            |_, p| {
                let mut b = whole(p);
                b.last_mut()
                    .expect("the chain of a get has no buffer for data")
                    .addr = (1 << 32) + (8 << 20) - PAGE_BYTES;
                b
            },
        ),
        rebuilt("get: data beyond 2^64", BAD_OR_STOPPED, get, |_, p| {
            let mut b = whole(p);
            b.last_mut()
                .expect("the chain of a get has no buffer for data")
                .addr = u64::MAX - PAGE_BYTES + 1;
            b
        }),
        rebuilt("answer outside memory", BAD_OR_STOPPED, flush, |_, p| {
            let mut b = whole(p);
            b.last_mut()
                .expect("the chain has no buffer for the answer")
                .addr = HOLE;
            b
        })
        .or(stopped),
        rebuilt(
            "lengths that add up beyond 2^32",
            BAD_OR_STOPPED,
            flush,
            |_, p| {
                let mut b = whole(p);
                let huge = Buffer {
                    addr: p.table,
                    len: u32::MAX,
                    writable: false,
                };
                b.splice(1..1, [huge, huge]);
                b
            },
        ),
        rebuilt("answer of 2^32 - 1 bytes", BAD_OR_STOPPED, flush, |_, p| {
            let mut b = whole(p);
            b.last_mut()
                .expect("the chain has no buffer for the answer")
                .len = u32::MAX;
            b
        }),
    ];
    let head = |name: &str, head: u16| {
        let send = move |g: &mut FakeGuest, t: Target| {
            let request = flush(t);
            let placed = g
                .place(&request.encode(g.generation()))
                .expect("the guest has no free slot");
            g.add_by_hand(t.queue, request, placed, head, vec![]);
            g.publish(t.queue);
            t.queue
        };
        Fault {
            name: name.into(),
            expect: stopped,
            send: Box::new(send),
        }
    };
    out.push(head("head beyond the ring", 128));
    out.push(head("head 65,535", u16::MAX));
    for ahead in [129, 1000, 0x8000] {
        let send = move |g: &mut FakeGuest, t: Target| {
            g.ring_mut(t.queue).publish_lie(ahead);
            g.kick(t.queue);
            t.queue
        };
        let name = format!("avail index {ahead} entries ahead in a ring of 128 entries");
        out.push(Fault {
            name,
            expect: stopped,
            send: Box::new(send),
        });
    }
    out
}
