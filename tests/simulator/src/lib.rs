// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The simulator: guests, VMMs and hosts on virtual time, in one thread, with every fault.
//!
//! The daemon and the pool are the real ones: connections, messages, rings, workers, requests,
//! storage. Their environment is modelled: driver, files and disk of a guest, the VMM, and time.
//! A seed determines a script of steps, and the same seed gives the same run, step for step. Three
//! oracles check the answers of the device, the requests of the driver, and the contents of blocks.
//!
//! | file | contents |
//! | --- | --- |
//! | `script.rs` | steps, drawn from a seed |
//! | `world.rs`, `world/` | execution of the steps; the end, when all faults are repaired |
//! | `host.rs`, `clock.rs` | the real daemon without threads; its clock and entropy source |
//! | `machine.rs` | a VM and its VMM: memory, interrupts, messages |
//! | `kernel.rs`, `content.rs` | a guest's files, page cache, bios and disk |
//! | `driver.rs`, `driver/`, `transport.rs` | `DriverModel`, the model of the guest driver |
//! | `oracle.rs` | the checks; `tmem_model::Model` judges the device's answers |
//! | `mutation.rs` | rules that can be broken |
//! | `shrink.rs`, `run.rs` | fewer steps for the same failure; many seeds |
//!
//! docs/simulator.md describes how to use the simulator, and what it leaves out.

mod clock;
mod content;
mod driver;
mod host;
mod kernel;
mod machine;
mod mutation;
mod oracle;
mod run;
mod script;
mod shrink;
mod transport;
mod world;

pub use mutation::Mutation;
pub use oracle::Failure;
pub use run::{Found, Outcome, Totals, run, run_seeds, run_traced};
pub use script::{Script, Setup, Step};
pub use shrink::shrink;
