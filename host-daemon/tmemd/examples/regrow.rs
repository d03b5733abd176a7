// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Acts as a VM that has returned its memory and takes it back: `regrow SOCKET MIB GO`. Connects to
//! the daemon with MIB mebibytes of memory, prints a line, and waits until the file GO exists. Then
//! uses all of its memory as fast as it can, prints the time, and keeps the memory.
//!
//! Tests run several of these programs to find out whether a host can give all VMs their memory at
//! once. The program is killed if the host runs out of memory.

use std::path::Path;
use std::time::{Duration, Instant};
use tmem_model::{FakeGuest, GuestConfig, RamRegion};

const PAGE: u64 = 4096;

/// Time between two looks for the file GO.
const POLL: Duration = Duration::from_millis(10);

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, socket, mib, go] = &arguments[..] else {
        return Err("usage: regrow SOCKET MIB GO".into());
    };
    let size_bytes = mib.parse::<u64>()? << 20;
    let mut guest = FakeGuest::new(GuestConfig {
        ram: vec![RamRegion {
            start: 0,
            size_bytes,
        }],
        ..GuestConfig::default()
    })?;
    guest.connect(Path::new(socket))?;
    guest.start()?;
    println!("ready");
    while !Path::new(go).exists() {
        std::thread::sleep(POLL);
    }
    let begun = Instant::now();
    let mut byte = [0];
    for page in (0..size_bytes).step_by(PAGE as usize) {
        // The daemon may read rings while this program writes, so no byte changes.
        guest.ram().read(page, &mut byte);
        guest.ram().write(page, &byte);
    }
    println!("{mib} MiB in {:.3} s", begun.elapsed().as_secs_f64());
    loop {
        std::thread::park();
    }
}
