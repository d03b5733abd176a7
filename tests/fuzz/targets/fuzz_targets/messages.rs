// SPDX-License-Identifier: Apache-2.0 OR MIT
//! libFuzzer target for `tmem_fuzz::messages`: arbitrary vhost-user messages to a complete daemon.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tmem_fuzz::messages(bytes));
