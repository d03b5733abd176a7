// SPDX-License-Identifier: Apache-2.0 OR MIT
//! libFuzzer target for `tmem_fuzz::requests`: arbitrary requests in well-formed descriptor chains.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tmem_fuzz::requests(bytes));
