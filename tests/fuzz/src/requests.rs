// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Fuzz target: requests with any bytes in well-formed chains. It tests parsing, execution and
//! answers.

use crate::input::Input;
use crate::judge::sizes;
use crate::machine::{ARENA, Machine, QUEUES};

/// Maximum number of requests that an input sends.
const REQUESTS_MAX: usize = 24;
/// Guest address of the bytes of a request. The pages and the answer follow them.
const META: u64 = ARENA;
const META_MAX: usize = 0x1000;
const DATA: u64 = META + META_MAX as u64;
/// Number of different page contents. If a request has more pages, several descriptors name the
/// same page.
const CONTENTS: u64 = 8;
const ANSWER: u64 = DATA + CONTENTS * 4096;
/// Length of the longest answer in bytes: 64 pages with their results, and some bytes more.
const ROOM_MAX: u64 = 66 * 4096;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// Runs the fuzz target with an input, which sends requests. For each request, the input has a byte
/// of flags, the number of pages, the length of the request, and its bytes.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let setup = input.u8();
    let mut machine = Machine::new(4, setup & 1 != 0, setup & 2 != 0);
    for number in 0..CONTENTS {
        let mut page = [number as u8; 4096];
        // Give the pages each kind of content that the engine distinguishes: one repeated word,
        // text, noise.
        for (at, byte) in page.iter_mut().enumerate() {
            match number % 3 {
                1 => *byte = (at % 61) as u8 ^ number as u8,
                2 => *byte = ((at * at * 40503 + at * 7919) >> 7) as u8 ^ number as u8,
                _ => {}
            }
        }
        assert!(machine.ram.write(DATA + number * 4096, &page));
    }
    for _ in 0..REQUESTS_MAX {
        if input.is_empty() {
            break;
        }
        request(&mut machine, &mut input);
    }
    machine.end();
}

fn request(machine: &mut Machine, input: &mut Input<'_>) {
    let flags = input.u8();
    if flags & 4 != 0 {
        machine.reset();
    }
    if flags & 8 != 0 {
        machine.host.maintain_all();
    }
    let pages = u64::from(input.u8());
    let length = usize::from(input.u16()) % META_MAX;
    let meta = input.bytes(length).to_vec();
    let room = match flags & 2 {
        0 => {
            let field = |at: usize| match meta.get(at..at + 2) {
                Some(bytes) => u16::from_le_bytes([bytes[0], bytes[1]]),
                None => 0,
            };
            sizes(field(8), field(10)).map_or(8, |sizes| sizes.1 as u64)
        }
        _ => u64::from(input.u32()) % ROOM_MAX,
    };
    assert!(machine.ram.write(META, &meta));
    // Place the indirect descriptor table behind the space of the longest answer.
    let table = ANSWER + ROOM_MAX;
    let mut buffers = vec![(META, meta.len() as u64, 0)];
    let turn = u64::from(flags >> 4);
    buffers.extend((0..pages).map(|page| (DATA + (page + turn) % CONTENTS * 4096, 4096, 0)));
    buffers.push((ANSWER, room, WRITE));
    let last = buffers.len() - 1;
    for (number, (address, bytes, flags)) in buffers.into_iter().enumerate() {
        let next = if number < last { NEXT } else { 0 };
        let to = number as u16 + 1;
        machine.describe(
            table,
            number as u64,
            address,
            bytes as u32,
            (flags | next, to),
        );
    }
    let queue = usize::from(flags & 1) % QUEUES;
    let head = machine.rings[queue].table;
    machine.describe(head, 0, table, 16 * (last as u32 + 1), (INDIRECT, 0));
    machine.offer(queue, 0);
    machine.kick(queue);
}
