// SPDX-License-Identifier: Apache-2.0 OR MIT
//! libFuzzer target for `tmem_fuzz::requests`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tmem_fuzz::requests(bytes));
