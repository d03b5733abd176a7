// SPDX-License-Identifier: Apache-2.0 OR MIT
//! libFuzzer target for `tmem_fuzz::rings`: arbitrary rings, descriptor chains and concurrent
//! actions.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tmem_fuzz::rings(bytes));
