// SPDX-License-Identifier: Apache-2.0 OR MIT
//! tmemctl: command line for the daemon's control socket. It also adds the virtio-tmem device to
//! libvirt's domains. docs/tmemctl.md describes its commands, JSON and exit codes.
//!
//! | file | contents |
//! | --- | --- |
//! | `cli.rs` | the command line, and which function runs each command |
//! | `operate.rs`, `quota.rs`, `libvirt.rs`, `retain.rs` | commands that change something |
//! | `emulator.rs`, `packaged.rs` | what a QEMU supports, the QEMU of the package virtio-tmem-qemu |
//! | `client.rs`, `reach.rs` | calls to the daemon, time limits |
//! | `show.rs`, `table.rs` | text of `list`, `stats` and `quota`, tables and units |
//! | `args.rs` | options that several commands have |
//! | `output.rs`, `exit.rs` | output, failures and exit codes |
//!
//! `tests/model/tests/module_graph.rs` fails if files import each other in a cycle.

mod advise;
mod args;
mod cli;
mod client;
mod doctor;
#[cfg(feature = "libvirt")]
mod emulator;
mod event;
mod exit;
#[cfg(feature = "libvirt")]
mod libvirt;
mod operate;
mod output;
#[cfg(feature = "libvirt")]
mod packaged;
mod quota;
mod reach;
#[cfg(feature = "libvirt")]
mod retain;
mod show;
mod table;
mod top;
mod trace;
mod watch;

pub use cli::{command, main};
