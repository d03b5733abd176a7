// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The daemon's configuration: settings with their defaults and limits, the configuration file, and
//! the users and groups that it names.
//!
//! Belongs here: parsing and validation. Out of scope: applying a setting to the running daemon,
//! see `daemon/`.

pub mod account;
pub mod arguments;
pub mod file;
pub mod meminfo;
pub mod settings;

pub use settings::*;
