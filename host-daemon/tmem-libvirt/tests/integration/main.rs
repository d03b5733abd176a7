// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of tmem-hook with a daemon, of the libraries that the programs load, and of attach and detach
//! on the XML of domains.

mod hook;
mod linking;
mod property;
mod refusals;
