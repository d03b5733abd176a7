// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of tmem-hook with a daemon, and of attach and detach on the XML of domains.

mod hook;
mod property;
mod refusals;
