// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Fuzz target: rings and descriptor chains of any shape. Chains may be direct or indirect, loop,
//! cross memory regions, or change while the daemon works on them. Drains, resets and hang-ups
//! happen in the middle of the daemon's work.

use std::sync::Arc;

use tmem_model::requests::{Cut, cut};
use tmem_model::{PutPage, Range, RefPage, Request};

use crate::host::Action;
use crate::input::Input;
use crate::machine::{ARENA, Machine, QUEUES};
use crate::ram::{BASE, Ram, SEAM, TOP};

/// Maximum number of steps that an input executes.
const STEPS_MAX: usize = 64;
/// Maximum number of pages of a well-formed request, so that several requests fit into memory.
const BATCH: usize = 6;
/// Number of pages of a slot, which is the guest memory for one request. Requests use the slots one
/// after the other. The pages after the slots are for descriptor tables of chains that the input
/// builds by hand.
const SLOT_PAGES: u64 = 2 * BATCH as u64 + 4;
const SLOTS: u64 = 4;

/// Runs the fuzz target with an input: executes its steps, and checks the daemon after each.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let shape = input.u8();
    let mut machine = Machine::new(1 << (shape % 7), shape & 0x80 != 0, shape & 0x40 != 0);
    let mut player = Player { slot: 0, head: 0 };
    for _ in 0..STEPS_MAX {
        if input.is_empty() || machine.is_over() {
            break;
        }
        player.step(&mut machine, &mut input);
    }
    machine.end();
}

struct Player {
    /// Number of the slot (memory for a request) that the next request uses.
    slot: u64,
    /// Number of the descriptor in the ring's table at which the next chain begins.
    head: u16,
}

/// Returns a guest address: mostly in the memory for requests, sometimes in the rings, at a
/// boundary or anywhere.
fn address(input: &mut Input<'_>) -> u64 {
    let near = |at: u64, input: &mut Input<'_>| at.wrapping_add(input.u8().into());
    match input.below(8) {
        0..=2 => ARENA + u64::from(input.u8()) * 0x400,
        3 => near(ARENA + u64::from(input.u8()) * 4096, input),
        4 => BASE + u64::from(input.u16()) % (ARENA - BASE),
        5 => near(SEAM, input).wrapping_sub(128),
        6 => near(TOP, input).wrapping_sub(128),
        _ => input.number(),
    }
}

fn page(seed: u8) -> Box<[u8; 4096]> {
    let mut page = Box::new([seed; 4096]);
    if seed >= 64 {
        for (at, byte) in page.iter_mut().enumerate() {
            *byte = ((at * usize::from(seed)) >> (seed % 5)) as u8;
        }
    }
    page
}

impl Player {
    fn step(&mut self, machine: &mut Machine, input: &mut Input<'_>) {
        match input.below(16) {
            0..=4 => self.request(machine, input),
            5 => {
                let queue = input.below(QUEUES);
                machine.kick(queue);
            }
            6 => {
                let (queue, number) = (input.below(QUEUES), u64::from(input.u8()) % 64);
                let table = machine.rings[queue].table;
                self.descriptor(machine, input, table, number);
            }
            7 => {
                let (table, number) = (ARENA + SLOTS * SLOT_PAGES * 4096, u64::from(input.u8()));
                self.descriptor(machine, input, table, number);
            }
            8 => {
                let queue = input.below(QUEUES);
                let head = input.number() as u16;
                machine.offer(queue, head);
            }
            9 => {
                // Publish an available index that the input has changed. A later step may publish a
                // correct one again.
                let queue = input.below(QUEUES);
                let ring = &mut machine.rings[queue];
                ring.offered = ring.offered.wrapping_add(input.number() as u16);
                machine.kick(queue);
            }
            10 => {
                let bytes = input.u32().to_le_bytes();
                let at = address(input);
                machine.ram.write(at, &bytes[..1 + input.below(4)]);
            }
            11 => {
                let checks = 1 + u64::from(input.u8()) % 24;
                let bytes = input.u32().to_le_bytes()[..1 + input.below(4)].to_vec();
                let at = address(input);
                if let Some(places) = Ram::places(at, bytes.len() as u64) {
                    let (file, from) = (machine.ram.file.clone(), places[0].0 as u64);
                    let bytes = bytes[..places[0].1].to_vec();
                    machine
                        .host
                        .watch
                        .at(checks, Action::Write(file, from, bytes));
                }
            }
            12 => machine.restart(input.below(QUEUES)),
            13 => {
                let checks = 1 + u64::from(input.u8()) % 24;
                let device = Arc::downgrade(machine.host.session.device());
                machine.host.watch.at(checks, Action::Drain(device));
                machine.kick(input.below(QUEUES));
                // Restart both queues, which completes the drain.
                machine.restart(0);
                machine.restart(1);
            }
            14 => match input.below(8) {
                0..=2 => machine.reset(),
                3 => machine.remap(false),
                4 => machine.remap(true),
                _ => machine.host.maintain_all(),
            },
            _ => {
                let checks = 1 + u64::from(input.u8()) % 24;
                let (file, bytes) = (machine.ram.file.clone(), machine.ram.image.len());
                machine.host.watch.at(checks, Action::HangUp(file, bytes));
            }
        }
    }

    fn descriptor(&self, machine: &mut Machine, input: &mut Input<'_>, table: u64, number: u64) {
        let address = address(input);
        let bytes = match input.below(4) {
            0 => u32::from(input.u8()),
            1 => 16 * u32::from(input.u8()),
            2 => 8 + u32::from(input.u8()) % 2 * 4096,
            _ => input.number() as u32,
        };
        let (flags, next) = (u16::from(input.u8()) % 8, u16::from(input.u8()));
        machine.describe(table, number, address, bytes, (flags, next));
    }

    /// Offers a well-formed request in a well-formed chain. The input may modify a byte of the
    /// request, the size of the answer, or the order of the buffers.
    fn request(&mut self, machine: &mut Machine, input: &mut Input<'_>) {
        let kind = input.below(16);
        let pool = 1 + input.u8() as u32 % 3;
        let (object, index) = (1 + input.u8() as u64 % 3, input.u8() as u64 % 12);
        let count = 1 + input.below(BATCH) as u64;
        let cookie = |index: u64| 1 + index + 16 * object;
        let seed = input.u8();
        let request = match kind {
            0..=5 => Request::Put {
                pool,
                pages: (index..index + count)
                    .map(|index| PutPage {
                        object,
                        index,
                        cookie: cookie(index),
                        flags: u32::from(seed & 1),
                        page: page(seed.wrapping_add(index as u8)),
                    })
                    .collect(),
            },
            6..=10 => Request::Get {
                pool,
                object,
                index,
                cookies: (index..index + count).map(cookie).collect(),
                retain: match machine.retain {
                    true => u64::from(seed) & !(u64::MAX << count),
                    false => 0,
                },
            },
            11 if machine.retain && seed & 0x80 != 0 => Request::Ref {
                pool,
                pages: (index..index + count)
                    .map(|index| RefPage {
                        object,
                        index,
                        cookie: cookie(index),
                    })
                    .collect(),
            },
            11 => Request::Flush {
                pool,
                ranges: vec![Range {
                    object,
                    index,
                    nr_pages: u64::from(seed) % 8,
                }],
            },
            12 => Request::PoolDestroy { pool },
            13 if seed & 2 != 0 => Request::Generation,
            13 => Request::Report(Box::new([seed & 1; 152])),
            _ => Request::PoolCreate {
                pool,
                flags: u32::from(seed & 1) * virtio_tmem::POOL_PRIVATE,
            },
        };
        let bend = input.u8();
        let mut encoded = request.encode(machine.model.generation());
        if bend & 1 != 0 {
            let at = usize::from(input.u8()) % encoded.meta.len();
            encoded.meta[at] ^= input.u8();
        }
        if bend & 2 != 0 {
            encoded.answer_meta_bytes = input.below(64);
        }
        let queue = usize::from(!request.is_control()) ^ usize::from(bend & 4 != 0);
        // Place the request first, then the answer. The pages of each begin at a page boundary.
        let slot = ARENA + self.slot * SLOT_PAGES * 4096;
        self.slot = (self.slot + 1) % SLOTS;
        let readable = slot + 4096 - encoded.meta.len() as u64;
        let half = slot + SLOT_PAGES / 2 * 4096;
        let writable = half + 4096 - encoded.answer_meta_bytes as u64;
        let mut all = encoded.meta.clone();
        all.extend(&encoded.data);
        assert!(machine.ram.write(readable, &all));
        let stretches = [
            (readable, encoded.meta.len(), false),
            (slot + 4096, encoded.data.len(), false),
            (writable, encoded.answer_meta_bytes, true),
            (half + 4096, encoded.answer_data_bytes, true),
        ];
        let how = match bend >> 6 {
            0 => Cut::Whole,
            1 => Cut::Natural,
            _ => Cut::Random {
                seed: u64::from(seed) + 256 * u64::from(bend),
                max: 24,
            },
        };
        let mut buffers = cut(&stretches, how);
        if bend & 8 != 0 && buffers.len() > 1 {
            // Swap two adjacent buffers, so that the chain is no longer well-formed.
            let at = input.below(buffers.len() - 1);
            buffers.swap(at, at + 1);
        }
        let ring = machine.rings[queue];
        let fits = buffers.len() <= usize::from(ring.size);
        let indirect = bend & 16 != 0 || !fits;
        // Place an indirect table at the beginning of the slot's first page. The request without
        // its data pages is at the end of the same page, and the two do not overlap.
        let (table, first, modulo) = match indirect {
            true => (slot, 0, u16::MAX),
            false => (ring.table, self.head, ring.size),
        };
        let last = buffers.len() - 1;
        for (number, buffer) in buffers.iter().enumerate() {
            let at = first.wrapping_add(number as u16) % modulo;
            let flags = if buffer.writable { 2 } else { 0 } | u16::from(number < last);
            let next = at.wrapping_add(1) % modulo;
            machine.describe(table, at.into(), buffer.addr, buffer.len, (flags, next));
        }
        let head = self.head % ring.size;
        self.head = self
            .head
            .wrapping_add(if indirect { 1 } else { last as u16 + 1 });
        if indirect {
            let bytes = 16 * buffers.len() as u32;
            machine.describe(ring.table, head.into(), table, bytes, (4, 0));
        }
        machine.offer(queue, head);
        if bend & 32 == 0 {
            machine.kick(queue);
        }
    }
}
