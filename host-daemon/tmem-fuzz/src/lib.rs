// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Guests and front ends that are anything a fuzzer comes up with.
//!
//! A target is a function of bytes that panics if a promise is broken. `host-daemon/fuzz/` runs the
//! targets under libFuzzer, guided by coverage, and keeps what it found in `fuzz/corpus/`; the tests
//! of this crate play that again, without it.
//!
//! | target | what the bytes are | what must hold |
//! | --- | --- | --- |
//! | [`requests`] | requests, in chains that are well made | each answer as specified, nothing else is written |
//! | [`rings`] | rings, descriptors, requests, and what happens meanwhile | the same; where it is no longer known what is asked: bounds, order, the neighbour |
//! | [`messages`] | vhost-user messages, through the socket | the daemon goes on and serves its neighbour |
//!
//! Never here: anything that only a well-behaved guest does; that is `tmem-sim`'s and `tmem-world`'s.

mod host;
mod input;
mod judge;
mod machine;
mod messages;
mod ram;
mod requests;
mod rings;

pub use messages::run as messages;
pub use requests::run as requests;
pub use rings::run as rings;

/// A target by name.
pub type Target = (&'static str, fn(&[u8]));

/// All of them.
pub const TARGETS: [Target; 3] = [
    ("requests", requests),
    ("rings", rings),
    ("messages", messages),
];
