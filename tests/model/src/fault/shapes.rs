// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Faults in sizes: the device can follow the descriptor chain, but parts of it have wrong sizes.

use super::*;

/// Returns the faults whose descriptor chains are valid but have parts of wrong sizes.
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
        out.extend(sizes(name, make));
    }
    for (name, make) in &requests[..2] {
        out.extend(result_sizes(name, *make));
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
                .expect("the chain of a put has no buffer with two pages");
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
            buffers
                .last_mut()
                .expect("the chain of a get has no buffer for data")
                .writable = false;
            buffers
        },
    ));
    // Send batches of 65 pages, in chains that would have the right sizes if 65 pages were allowed.
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

/// Returns requests with wrong sizes. Each of these faults is possible in any request, including
/// one whose answer has no per-page results.
fn sizes(name: &str, make: Make) -> Vec<Fault> {
    let mut out = Vec::new();
    out.push(rebuilt(
        format!("{name} with a readable byte too many"),
        BAD,
        make,
        |_, p| {
            let mut buffers = whole(p);
            let at = buffers
                .iter()
                .position(|b| b.writable)
                .expect("the chain has no buffer for the answer");
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
        format!("{name} with a readable byte too few"),
        BAD,
        make,
        |_, p| {
            let mut buffers = whole(p);
            let at = buffers
                .iter()
                .rposition(|b| !b.writable)
                .expect("the chain has no buffer for the request");
            buffers[at].len -= 1;
            buffers
        },
    ));
    out.push(rebuilt(
        format!("{name} without a readable byte"),
        BAD,
        make,
        |_, p| whole(p).into_iter().filter(|b| b.writable).collect(),
    ));
    out.push(rebuilt(
        format!("{name} with 23 readable bytes, one less than a request header"),
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
        format!("{name} with a writable byte too many"),
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
        format!("{name} with too few writable bytes for a status"),
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
        format!("{name} without a writable buffer"),
        Expect::Stopped,
        make,
        |_, p| whole(p).into_iter().filter(|b| !b.writable).collect(),
    ));
    out.push(rebuilt(
        format!("{name} with the writable buffers before the readable ones"),
        BAD_OR_STOPPED,
        make,
        |_, p| {
            let mut buffers = whole(p);
            buffers.rotate_right(p.writable.iter().filter(|w| w.1 > 0).count());
            buffers
        },
    ));
    out.push(rebuilt(
        format!("{name} with a readable buffer after the writable ones"),
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
    out
}

/// Returns the faults in the size of an answer that has a result for each page.
fn result_sizes(name: &str, make: Make) -> Vec<Fault> {
    let mut out = Vec::new();
    out.push(rebuilt(
        format!("{name} with a writable byte too few for the results"),
        BAD,
        make,
        |_, p| {
            let mut buffers = whole(p);
            buffers
                .last_mut()
                .expect("the chain has no buffer for the answer")
                .len -= 1;
            buffers
        },
    ));
    out.push(rebuilt(
        format!("{name} with writable bytes for the status only"),
        BAD,
        make,
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
    out
}

/// Returns the faults in the sizes of a REF (reference to retained pages).
pub(super) fn reference_faults() -> Vec<Fault> {
    let mut out = sizes("ref", refer);
    out.extend(result_sizes("ref", refer));
    out.push(batch_of_65("ref of 65 pages", refer, |g, p, meta| {
        g.ram().write(p.table, &meta[..REQ_BYTES]);
        for i in 0..65 {
            let at = p.table + (REQ_BYTES + i * REF_PAGE_BYTES) as u64;
            g.ram()
                .write(at, &meta[REQ_BYTES..REQ_BYTES + REF_PAGE_BYTES]);
        }
        let head = Buffer {
            addr: p.table,
            len: (REQ_BYTES + 65 * REF_PAGE_BYTES) as u32,
            writable: false,
        };
        let answer = Buffer {
            addr: p.writable[0].0,
            len: (RESP_BYTES + 65) as u32,
            writable: true,
        };
        vec![head, answer]
    }));
    out
}

/// Returns a fault whose request has the count 65. `build` makes a chain with the sizes for 65
/// pages.
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
