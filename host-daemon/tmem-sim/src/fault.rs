// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Every way in which a guest's request can be wrong, and what SPEC.md, "Requests", makes of it.
//!
//! A fault is sent to a device that holds the page of its [`Target`]: whatever is answered, a
//! request that was not carried out must leave that page where it is. Never a fault that an honest
//! driver's request could be mistaken for.

use virtio_tmem as wire;
use vm_memory::{GuestAddress, GuestMemoryBackend};

use crate::content::Content;
use crate::frontend::{FakeGuest, Placed};
use crate::memory::PAGE_BYTES;
use crate::requests::{
    Encoded, GET_PAGE_BYTES, PAGE, PUT_PAGE_BYTES, PutPage, REPORT_BYTES, REQ_BYTES, RESP_BYTES,
    Range, Request,
};
use crate::ring::{Buffer, DESC_BYTES, Desc, F_INDIRECT, F_NEXT, F_WRITE};

/// What must become of a faulty request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    /// One of these statuses; the queue goes on.
    Status(&'static [u8]),
    /// No answer: the queue stops.
    Stopped,
    /// The specification leaves it to the device: one of these statuses, or the queue stops.
    Either(&'static [u8]),
}

/// A page that the device holds while the fault is sent.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// A live pool.
    pub pool: u32,
    /// Object.
    pub object: u64,
    /// Index.
    pub index: u64,
    /// The cookie under which it is held.
    pub cookie: u64,
    /// The request queue of the page.
    pub queue: usize,
}

type Send = Box<dyn Fn(&mut FakeGuest, Target) -> usize>;

/// A wrong request.
pub struct Fault {
    /// What is wrong with it.
    pub name: String,
    /// What must become of it.
    pub expect: Expect,
    send: Send,
}

impl Fault {
    /// Sends it; returns the queue.
    pub fn send(&self, guest: &mut FakeGuest, target: Target) -> usize {
        (self.send)(guest, target)
    }
}

const BAD: Expect = Expect::Status(&[wire::S_BAD]);
const UNSUPPORTED: Expect = Expect::Status(&[wire::S_UNSUPPORTED]);
const REFUSED: Expect = Expect::Status(&[wire::S_BAD, wire::S_UNSUPPORTED]);
const BAD_OR_NO_POOL: Expect = Expect::Status(&[wire::S_BAD, wire::S_NO_POOL]);
const NO_POOL: Expect = Expect::Status(&[wire::S_NO_POOL]);
const STALE: Expect = Expect::Status(&[wire::S_STALE]);
const BAD_OR_STOPPED: Expect = Expect::Either(&[wire::S_BAD, wire::S_UNSUPPORTED]);
const ANYTHING: Expect = Expect::Either(&[wire::S_BAD, wire::S_UNSUPPORTED, wire::S_OK]);

/// Offsets of fields in `meta`.
const GENERATION: usize = 0;
const TYPE: usize = 8;
const COUNT: usize = 10;
const POOL: usize = 12;
const RESERVED: usize = 16;
const BODY: usize = REQ_BYTES;

/// A put of two pages, the target first.
fn put(t: Target) -> Request {
    let page = |i: u64| PutPage {
        object: t.object,
        index: t.index + i,
        cookie: t.cookie + 100 + i,
        flags: 0,
        page: Content::Text(i).page(),
    };
    Request::Put {
        pool: t.pool,
        pages: vec![page(0), page(1)],
    }
}

/// A get of two pages, the target first.
fn get(t: Target) -> Request {
    let cookies = vec![t.cookie, t.cookie + 1];
    Request::Get {
        pool: t.pool,
        object: t.object,
        index: t.index,
        cookies,
    }
}

/// A flush of two ranges, the target first.
fn flush(t: Target) -> Request {
    let range = |i: u64| Range {
        object: t.object,
        index: t.index + i,
        nr_pages: 1,
    };
    Request::Flush {
        pool: t.pool,
        ranges: vec![range(0), range(5)],
    }
}

fn create(t: Target) -> Request {
    Request::PoolCreate {
        pool: t.pool + 1,
        flags: 0,
    }
}

fn destroy(t: Target) -> Request {
    Request::PoolDestroy { pool: t.pool }
}

fn report(_: Target) -> Request {
    Request::Report(Box::new([0; REPORT_BYTES]))
}

type Make = fn(Target) -> Request;

fn queue_for(request: &Request, t: Target) -> usize {
    if request.is_control() {
        wire::CONTROL_QUEUE
    } else {
        t.queue
    }
}

/// Sends bytes that were bent, in a chain that is well formed.
fn send_encoded(g: &mut FakeGuest, queue: usize, request: Request, encoded: &Encoded) -> usize {
    let generation = g.generation();
    g.add_encoded(queue, request, generation, encoded)
        .expect("room for a fault");
    g.publish(queue);
    queue
}

fn bent(
    name: impl Into<String>,
    expect: Expect,
    make: Make,
    bend: impl Fn(Encoded) -> Encoded + 'static,
) -> Fault {
    let send = move |g: &mut FakeGuest, t: Target| {
        let request = make(t);
        let encoded = bend(request.encode(g.generation()));
        let queue = queue_for(&request, t);
        send_encoded(g, queue, request, &encoded)
    };
    Fault {
        name: name.into(),
        expect,
        send: Box::new(send),
    }
}

/// Sends a request as a chain of buffers that `build` makes of where it was placed.
fn rebuilt(
    name: impl Into<String>,
    expect: Expect,
    make: Make,
    build: impl Fn(&mut FakeGuest, &Placed) -> Vec<Buffer> + 'static,
) -> Fault {
    raw(name, expect, make, move |g, _, p| {
        let buffers = build(g, p);
        let mut descs: Vec<Desc> = buffers
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
    })
}

/// Chains descriptors in order; `next` counts from the first and is moved to real slots later.
fn link(descs: &mut [Desc]) {
    for i in 1..descs.len() {
        descs[i - 1].flags |= F_NEXT;
        descs[i - 1].next = i as u16;
    }
}

/// Sends a request as ring descriptors of the caller's making. A `next` below their number is
/// relative to the first, any other is taken as it is.
fn raw(
    name: impl Into<String>,
    expect: Expect,
    make: Make,
    build: impl Fn(&mut FakeGuest, usize, &Placed) -> Vec<Desc> + 'static,
) -> Fault {
    let send = move |g: &mut FakeGuest, t: Target| {
        let request = make(t);
        let queue = queue_for(&request, t);
        let encoded = request.encode(g.generation());
        let mut placed = g.place(&encoded).expect("room for a fault");
        let descs = build(g, queue, &placed.1);
        // `resp` goes to the first writable byte, which the fault may have moved.
        let first = descs
            .iter()
            .find(|d| d.flags & F_WRITE != 0 && d.flags & F_INDIRECT == 0);
        if let Some(d) = first
            && d.addr != placed.1.writable[0].0
            && g.ram().map().check_range(GuestAddress(d.addr), RESP_BYTES)
        {
            g.ram().write(d.addr, &[wire::S_UNANSWERED; RESP_BYTES]);
            placed.1.writable = vec![(d.addr, RESP_BYTES)];
        }
        let ring = g.ring_mut(queue);
        let slots: Vec<u16> = descs
            .iter()
            .map(|_| ring.take_desc().expect("room for a fault"))
            .collect();
        for (slot, mut desc) in slots.iter().zip(descs) {
            if desc.flags & F_NEXT != 0 {
                desc.next = slots
                    .get(usize::from(desc.next))
                    .copied()
                    .unwrap_or(desc.next);
            }
            ring.write_desc(*slot, desc);
        }
        let head = slots[0];
        g.add_by_hand(queue, request, placed, head, slots);
        g.publish(queue);
        queue
    };
    Fault {
        name: name.into(),
        expect,
        send: Box::new(send),
    }
}

fn whole(p: &Placed) -> Vec<Buffer> {
    let side = |s: &[(u64, usize)], writable| -> Vec<Buffer> {
        s.iter()
            .filter(|s| s.1 > 0)
            .map(|&(addr, n)| Buffer {
                addr,
                len: n as u32,
                writable,
            })
            .collect()
    };
    let mut out = side(&p.readable, false);
    out.extend(side(&p.writable, true));
    out
}

/// An address that is no RAM: between the regions of the default machine.
pub const HOLE: u64 = 2 << 30;

/// All faults.
#[must_use]
pub fn all() -> Vec<Fault> {
    let mut out = values();
    out.extend(shapes());
    out.extend(chains());
    out
}

/// Well-formed chains with a wrong value in a field.
fn values() -> Vec<Fault> {
    let mut out = Vec::new();
    let requests: [(&str, Make); 6] = [
        ("put", put),
        ("get", get),
        ("flush", flush),
        ("create", create),
        ("destroy", destroy),
        ("report", report),
    ];
    for (name, make) in requests {
        for unknown in [0u16, 4, 15, 19, u16::MAX] {
            out.push(bent(
                format!("{name} as type {unknown}"),
                UNSUPPORTED,
                make,
                move |e| e.patch(TYPE, &unknown.to_le_bytes()),
            ));
        }
        out.push(bent(
            format!("{name} with req.reserved"),
            REFUSED,
            make,
            |e| e.patch(RESERVED + 7, &[1]),
        ));
        for generation in [0, 1, u64::MAX] {
            out.push(bent(
                format!("{name} of generation {generation}"),
                STALE,
                make,
                move |e| e.patch(GENERATION, &generation.to_le_bytes()),
            ));
        }
        for flip in [0, 31, 32, 63] {
            out.push(bent(
                format!("{name}: generation bit {flip}"),
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
                format!("{name}: count {wrong}, not {count}"),
                BAD,
                make,
                move |e| e.patch(COUNT, &wrong.to_le_bytes()),
            ));
        }
        if name != "report" {
            out.push(bent(
                format!("{name} of pool 0"),
                BAD_OR_NO_POOL,
                make,
                |e| e.patch(POOL, &[0; 4]),
            ));
        }
        if !matches!(name, "report" | "create") {
            out.push(bent(
                format!("{name} of no live pool"),
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
            expect: REFUSED,
            send: Box::new(other),
        });
    }
    let second = BODY + PUT_PAGE_BYTES;
    let index_end = (1u64 << wire::INDEX_BITS).to_le_bytes();
    let max = u64::MAX.to_le_bytes();
    // In the second page or range: the first, which is right, must not be carried out either.
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
    out.push(bent("put with flag 2", REFUSED, put, move |e| {
        e.patch(second + 24, &[2])
    }));
    out.push(bent("put with flag 2^31", REFUSED, put, move |e| {
        e.patch(second + 27, &[128])
    }));
    out.push(bent("put with reserved", REFUSED, put, move |e| {
        e.patch(second + 28, &[1])
    }));
    out.push(bent("get of object 0", BAD, get, |e| {
        e.patch(BODY, &[0; 8])
    }));
    out.push(bent("get of index 2^51", BAD, get, move |e| {
        e.patch(BODY + 8, &index_end)
    }));
    let last = ((1u64 << wire::INDEX_BITS) - 1).to_le_bytes();
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
    out.push(bent("create with flag 1", UNSUPPORTED, create, |e| {
        e.patch(BODY, &[1])
    }));
    out.push(bent("create with flag 2^31", UNSUPPORTED, create, |e| {
        e.patch(BODY + 3, &[128])
    }));
    out.push(bent("create with reserved", REFUSED, create, |e| {
        e.patch(BODY + 4, &[1])
    }));
    out
}

/// Chains that can be followed and have the wrong sizes.
fn shapes() -> Vec<Fault> {
    let mut out = Vec::new();
    let requests: [(&str, Make); 6] = [
        ("put", put),
        ("get", get),
        ("flush", flush),
        ("create", create),
        ("destroy", destroy),
        ("report", report),
    ];
    for (name, make) in requests {
        out.push(rebuilt(
            format!("{name}: a readable byte too many"),
            BAD,
            make,
            |_, p| {
                let mut buffers = whole(p);
                let at = buffers.iter().position(|b| b.writable).expect("an answer");
                buffers.insert(
                    at,
                    Buffer {
                        addr: p.table,
                        len: 1,
                        writable: false,
                    },
                );
                buffers
            },
        ));
        out.push(rebuilt(
            format!("{name}: a readable byte too few"),
            BAD,
            make,
            |_, p| {
                let mut buffers = whole(p);
                let at = buffers
                    .iter()
                    .rposition(|b| !b.writable)
                    .expect("a request");
                buffers[at].len -= 1;
                buffers
            },
        ));
        out.push(rebuilt(
            format!("{name}: no readable byte"),
            BAD,
            make,
            |_, p| whole(p).into_iter().filter(|b| b.writable).collect(),
        ));
        out.push(rebuilt(
            format!("{name}: 23 readable bytes"),
            BAD,
            make,
            |_, p| {
                let addr = p.readable[0].0;
                let mut buffers = vec![Buffer {
                    addr,
                    len: REQ_BYTES as u32 - 1,
                    writable: false,
                }];
                buffers.extend(whole(p).into_iter().filter(|b| b.writable));
                buffers
            },
        ));
        out.push(rebuilt(
            format!("{name}: a writable byte too many"),
            BAD,
            make,
            |_, p| {
                let mut buffers = whole(p);
                buffers.push(Buffer {
                    addr: p.table,
                    len: 1,
                    writable: true,
                });
                buffers
            },
        ));
        out.push(rebuilt(
            format!("{name}: no room for resp"),
            Expect::Stopped,
            make,
            |_, p| {
                let mut buffers: Vec<_> = whole(p).into_iter().filter(|b| !b.writable).collect();
                let (addr, len) = (p.writable[0].0, RESP_BYTES as u32 - 1);
                buffers.push(Buffer {
                    addr,
                    len,
                    writable: true,
                });
                buffers
            },
        ));
        out.push(rebuilt(
            format!("{name}: nothing writable"),
            Expect::Stopped,
            make,
            |_, p| whole(p).into_iter().filter(|b| !b.writable).collect(),
        ));
        out.push(rebuilt(
            format!("{name}: writable first"),
            BAD_OR_STOPPED,
            make,
            |_, p| {
                let mut buffers = whole(p);
                buffers.rotate_right(p.writable.iter().filter(|w| w.1 > 0).count());
                buffers
            },
        ));
        out.push(rebuilt(
            format!("{name}: readable last"),
            BAD_OR_STOPPED,
            make,
            |_, p| {
                let mut buffers = whole(p);
                buffers.push(Buffer {
                    addr: p.table,
                    len: 8,
                    writable: false,
                });
                buffers
            },
        ));
    }
    for (name, make) in &requests[..2] {
        out.push(rebuilt(
            format!("{name}: a result byte too few"),
            BAD,
            *make,
            |_, p| {
                let mut buffers = whole(p);
                buffers.last_mut().expect("an answer").len -= 1;
                buffers
            },
        ));
        out.push(rebuilt(
            format!("{name}: only room for resp"),
            BAD,
            *make,
            |_, p| {
                let mut buffers: Vec<_> = whole(p).into_iter().filter(|b| !b.writable).collect();
                let (addr, len) = (p.writable[0].0, RESP_BYTES as u32);
                buffers.push(Buffer {
                    addr,
                    len,
                    writable: true,
                });
                buffers
            },
        ));
    }
    out.push(rebuilt(
        "put: page data writable",
        BAD_OR_STOPPED,
        put,
        |_, p| {
            let mut buffers = whole(p);
            let data = buffers
                .iter_mut()
                .find(|b| b.len as usize == 2 * PAGE)
                .expect("data");
            data.writable = true;
            buffers
        },
    ));
    out.push(rebuilt(
        "get: page data readable",
        BAD_OR_STOPPED,
        get,
        |_, p| {
            let mut buffers = whole(p);
            buffers.last_mut().expect("data").writable = false;
            buffers
        },
    ));
    // 65 of each, of a shape that would be right if 65 were allowed.
    out.push(batch_of_65("put of 65 pages", put, |g, p, pages| {
        let head = Buffer {
            addr: p.table,
            len: (REQ_BYTES + 65 * PUT_PAGE_BYTES) as u32,
            writable: false,
        };
        let (req, put_pages) = pages.split_at(REQ_BYTES);
        g.ram().write(p.table, req);
        for i in 0..65 {
            let at = p.table + (REQ_BYTES + i * PUT_PAGE_BYTES) as u64;
            g.ram().write(at, &put_pages[..PUT_PAGE_BYTES]);
        }
        let data = Buffer {
            addr: p.readable[1].0,
            len: 13 * PAGE as u32,
            writable: false,
        };
        let answer = Buffer {
            addr: p.writable[0].0,
            len: (RESP_BYTES + 65) as u32,
            writable: true,
        };
        [vec![head], vec![data; 5], vec![answer]].concat()
    }));
    out.push(batch_of_65("get of 65 pages", get, |g, p, meta| {
        let readable = (REQ_BYTES + 16 + 65 * 8) as u32;
        g.ram().write(p.table, &meta[..REQ_BYTES + 16]);
        let head = Buffer {
            addr: p.table,
            len: readable,
            writable: false,
        };
        let (addr, len) = (p.writable[0].0, (RESP_BYTES + 65 * GET_PAGE_BYTES) as u32);
        let resp = Buffer {
            addr: p.writable[0].0,
            len: RESP_BYTES as u32,
            writable: true,
        };
        let len = (65 * GET_PAGE_BYTES) as u32;
        let results = Buffer {
            addr: p.table + 2048,
            len,
            writable: true,
        };
        let data = Buffer {
            addr: p.writable[1].0,
            len: 13 * PAGE as u32,
            writable: true,
        };
        [vec![head, resp, results], vec![data; 5]].concat()
    }));
    out.push(batch_of_65("flush of 65 ranges", flush, |g, p, meta| {
        g.ram().write(p.table, &meta[..REQ_BYTES]);
        for i in 0..65 {
            let at = p.table + (REQ_BYTES + i * 24) as u64;
            g.ram().write(at, &meta[REQ_BYTES..REQ_BYTES + 24]);
        }
        let len = (REQ_BYTES + 65 * 24) as u32;
        let head = Buffer {
            addr: p.table,
            len,
            writable: false,
        };
        let answer = Buffer {
            addr: p.writable[0].0,
            len: RESP_BYTES as u32,
            writable: true,
        };
        vec![head, answer]
    }));
    out
}

/// A request whose count is 65 and whose chain agrees.
fn batch_of_65(
    name: &str,
    make: Make,
    build: fn(&mut FakeGuest, &Placed, &[u8]) -> Vec<Buffer>,
) -> Fault {
    rebuilt(name, BAD, make, move |g, p| {
        let (addr, n) = p.readable[0];
        let mut meta = vec![0; n];
        g.ram().read(addr, &mut meta);
        meta[COUNT..COUNT + 2].copy_from_slice(&65u16.to_le_bytes());
        build(g, p, &meta)
    })
}

/// Chains that cannot be followed, or lead out of memory.
fn chains() -> Vec<Fault> {
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
                let last = d.last_mut().expect("an answer");
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
                // 256 descriptors in the table, more than the ring has: a byte each, then the answer.
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
            b.last_mut().expect("data").addr = HOLE;
            b
        }),
        rebuilt(
            "get: data ends outside memory",
            BAD_OR_STOPPED,
            get,
            |_, p| {
                let mut b = whole(p);
                b.last_mut().expect("data").addr = (1 << 32) + (8 << 20) - PAGE_BYTES;
                b
            },
        ),
        rebuilt("get: data beyond 2^64", BAD_OR_STOPPED, get, |_, p| {
            let mut b = whole(p);
            b.last_mut().expect("data").addr = u64::MAX - PAGE_BYTES + 1;
            b
        }),
        rebuilt("answer outside memory", BAD_OR_STOPPED, flush, |_, p| {
            let mut b = whole(p);
            b.last_mut().expect("an answer").addr = HOLE;
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
            b.last_mut().expect("an answer").len = u32::MAX;
            b
        }),
    ];
    let head = |name: &str, head: u16| {
        let send = move |g: &mut FakeGuest, t: Target| {
            let request = flush(t);
            let placed = g.place(&request.encode(g.generation())).expect("room");
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
        let name = format!("avail index ahead by {ahead} of 128");
        out.push(Fault {
            name,
            expect: stopped,
            send: Box::new(send),
        });
    }
    out
}

impl Fault {
    /// The same with another expectation.
    fn or(mut self, expect: Expect) -> Self {
        self.expect = expect;
        self
    }
}
