// SPDX-License-Identifier: Apache-2.0 OR MIT
//! All kinds of faults that a guest's request can have, and the reaction of the device that
//! SPEC.md, "Requests", requires.
//!
//! A test sends each fault to a device that has the page of the fault's [`Target`]. If the device
//! does not execute the faulty request, it must still have that page, whatever it answers. No
//! correct driver sends any of these requests.

mod chains;
mod shapes;
mod values;

use virtio_tmem as wire;
use vm_memory::{GuestAddress, GuestMemoryBackend};

use crate::content::Content;
use crate::frontend::{FakeGuest, Placed};
use crate::memory::PAGE_BYTES;
use crate::requests::{
    Encoded, GET_PAGE_BYTES, LATENCIES_BYTES, PAGE, PUT_PAGE_BYTES, PutPage, REF_PAGE_BYTES,
    REPORT_BYTES, REQ_BYTES, RESP_BYTES, Range, RefPage, Request,
};
use crate::ring::{Buffer, DESC_BYTES, Desc, F_INDIRECT, F_NEXT, F_WRITE};

/// Required reaction to a faulty request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    /// The device answers with one of these statuses, and continues to serve the queue.
    Status(&'static [u8]),
    /// The device gives no answer, and stops the queue.
    Stopped,
    /// The specification gives the device a choice: it answers with one of these statuses, or stops
    /// the queue.
    Either(&'static [u8]),
}

/// A page that the device has when a faulty request is sent. The request names this page.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Id of the pool that contains the page.
    pub pool: u32,
    /// Id of the object that contains the page.
    pub object: u64,
    /// Index of the page in its object.
    pub index: u64,
    /// Cookie with which the page was put.
    pub cookie: u64,
    /// Request queue that requests for the page use.
    pub queue: usize,
}

type Send = Box<dyn Fn(&mut FakeGuest, Target) -> usize>;

/// A faulty request, with the reaction that the specification requires of the device.
pub struct Fault {
    /// Description of the fault, for test messages.
    pub name: String,
    /// Reaction that the specification requires of the device.
    pub expect: Expect,
    send: Send,
}

impl Fault {
    /// Sends the faulty request. Returns the number of the queue that it uses.
    pub fn send(&self, guest: &mut FakeGuest, target: Target) -> usize {
        (self.send)(guest, target)
    }
}

const BAD: Expect = Expect::Status(&[wire::S_BAD]);
const UNSUPPORTED: Expect = Expect::Status(&[wire::S_UNSUPPORTED]);
const NO_POOL: Expect = Expect::Status(&[wire::S_NO_POOL]);
const STALE: Expect = Expect::Status(&[wire::S_STALE]);
const BAD_OR_STOPPED: Expect = Expect::Either(&[wire::S_BAD, wire::S_UNSUPPORTED]);
const ANYTHING: Expect = Expect::Either(&[wire::S_BAD, wire::S_UNSUPPORTED, wire::S_OK]);

/// Offsets of fields in the metadata of a request, where tests write wrong values.
const GENERATION: usize = 0;
const TYPE: usize = 8;
const COUNT: usize = 10;
const POOL: usize = 12;
const RETAIN: usize = 16;
const BODY: usize = REQ_BYTES;

/// Returns a put of two pages. The first one is the target.
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

/// Returns a get of two pages. The first one is the target.
fn get(t: Target) -> Request {
    let cookies = vec![t.cookie, t.cookie + 1];
    Request::Get {
        pool: t.pool,
        object: t.object,
        index: t.index,
        cookies,
        retain: 0,
    }
}

/// Returns a flush of two ranges of one page each. The first range is the target.
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

/// Returns a reference (REF) to two pages. The first one is the target.
fn refer(t: Target) -> Request {
    let page = |i: u64| RefPage {
        object: t.object,
        index: t.index + i,
        cookie: t.cookie + i,
    };
    Request::Ref {
        pool: t.pool,
        pages: vec![page(0), page(1)],
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

fn latencies(_: Target) -> Request {
    Request::Latencies(Box::new([0; LATENCIES_BYTES]))
}

fn generation(_: Target) -> Request {
    Request::Generation
}

type Make = fn(Target) -> Request;

fn queue_for(request: &Request, t: Target) -> usize {
    if request.is_control() {
        wire::CONTROL_QUEUE
    } else {
        t.queue
    }
}

/// Sends the bytes `encoded` in a well-formed chain, as the request `request`. Returns the queue.
fn send_encoded(g: &mut FakeGuest, queue: usize, request: Request, encoded: &Encoded) -> usize {
    let generation = g.generation();
    g.add_encoded(queue, request, generation, encoded)
        .expect("the virtqueue has no space for a faulty request");
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

/// Returns a fault that sends a request as a chain of buffers. `build` makes the buffers from the
/// addresses of the request's parts in guest memory.
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

/// Links the descriptors in their order. Sets the field `next` to the position in `descs`, which
/// [`raw`] later replaces by the number of the descriptor in the ring.
fn link(descs: &mut [Desc]) {
    for i in 1..descs.len() {
        descs[i - 1].flags |= F_NEXT;
        descs[i - 1].next = i as u16;
    }
}

/// Returns a fault that sends a request as the ring descriptors that `build` returns. If the field
/// `next` of a descriptor is a position among these descriptors, the fault replaces the position by
/// that descriptor's number in the ring. It leaves any other value of `next` unchanged.
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
        let mut placed = g
            .place(&encoded)
            .expect("the virtqueue has no space for a faulty request");
        let descs = build(g, queue, &placed.1);
        // Find the first writable byte, to which the device writes the status. `build` may have
        // moved it.
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
            .map(|_| {
                ring.take_desc()
                    .expect("the virtqueue has no space for a faulty request")
            })
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

/// Guest-physical address without memory, between the regions of the default [`FakeGuest`].
pub const HOLE: u64 = 2 << 30;

/// Returns all faults that can be sent by a driver that has not accepted `VIRTIO_TMEM_F_RETAIN`.
#[must_use]
pub fn all() -> Vec<Fault> {
    let mut out = values::all();
    out.extend(shapes::all());
    out.extend(chains::all());
    out
}

/// Returns all faults that concern retained pages. The driver that sends them has accepted
/// `VIRTIO_TMEM_F_RETAIN`.
#[must_use]
pub fn retained_page_faults() -> Vec<Fault> {
    let mut out = values::retained_page_faults();
    out.extend(shapes::reference_faults());
    out
}

impl Fault {
    /// Returns the fault with `expect` as the required reaction.
    fn or(mut self, expect: Expect) -> Self {
        self.expect = expect;
        self
    }
}
