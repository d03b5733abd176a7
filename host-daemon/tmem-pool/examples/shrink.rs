// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Measures how fast a full pool returns memory to the system when its size becomes smaller:
//! `shrink MIB THREADS`. The rate bounds how fast another process may take memory from the host
//! while the pool gives way to it.

use std::sync::Arc;
use std::time::Instant;
use tmem_pool::{Engine, EngineConfig, PAGE_SIZE, Put, PutResult, Quota, TenantSpec, Time};

/// Pages of a put, as in a request of a guest.
const BATCH: usize = 64;

fn main() {
    let mut numbers = std::env::args()
        .skip(1)
        .map(|text| text.parse().expect("not a number"));
    let mib: u64 = numbers.next().expect("usage: shrink MIB THREADS");
    let threads: usize = numbers.next().expect("usage: shrink MIB THREADS") as usize;
    let size_bytes = mib << 20;
    let engine = Engine::new(EngineConfig::new(size_bytes, 42)).expect("no address space");
    let quota = Quota {
        reserve_bytes: 0,
        limit_bytes: None,
        weight: 100,
    };
    let tenant = engine
        .add_tenant(TenantSpec::new("vm", quota))
        .expect("no tenant");
    tenant.create_pool(1).expect("no pool");
    // A linear congruential generator suffices: the pages only have to differ.
    let mut state = 42u64;
    let mut random = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 32) as u32
    };
    let mut pages = vec![[0; PAGE_SIZE]; BATCH];
    let mut index = 0;
    while engine.held_bytes() < size_bytes / 100 * 97 {
        // lz4 compresses these pages to about half of their size.
        for page in &mut pages {
            let random_bytes = PAGE_SIZE / 4 + random() as usize % (PAGE_SIZE / 2);
            let (head, tail) = page.split_at_mut(random_bytes / 4 * 4);
            head.as_chunks_mut().0.fill_with(|| random().to_ne_bytes());
            tail.fill(7);
        }
        let puts: Vec<_> = pages
            .iter()
            .zip(index..)
            .map(|(page, index)| Put {
                object: index >> 8,
                index,
                cookie: 1,
                workingset: false,
                page,
            })
            .collect();
        let mut results = [PutResult::Refused; BATCH];
        tenant.put(1, &puts, &mut results).expect("no pool");
        index += BATCH as u64;
        while engine.maintain(Time(0), 1024) {}
    }
    let before = engine.held_bytes();
    let target = before / 4;
    engine.resize(target);
    let begun = Instant::now();
    let work = |engine: Arc<Engine>| {
        std::thread::spawn(move || {
            let begun_ns = cpu_ns();
            while engine.held_bytes() > target {
                engine.maintain(Time(0), 1024);
            }
            cpu_ns() - begun_ns
        })
    };
    let workers: Vec<_> = (0..threads).map(|_| work(engine.clone())).collect();
    let times = workers
        .into_iter()
        .map(|thread| thread.join().expect("a thread panicked"));
    let cpu_ns: u64 = times.sum();
    let released = before - engine.held_bytes();
    let seconds = begun.elapsed().as_secs_f64();
    let gib = released as f64 / (1u64 << 30) as f64;
    println!(
        "{} MiB of {size_bytes} bytes: {:.2} GiB/s, {:.2} GiB for each second of a processor",
        released >> 20,
        gib / seconds,
        gib / (cpu_ns as f64 / 1e9),
    );
}

/// Returns the processor time of this thread in nanoseconds.
fn cpu_ns() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").expect("no scheduler times");
    let first = text.split(' ').next();
    first
        .and_then(|ns| ns.parse().ok())
        .expect("no scheduler times")
}
