// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Generates the Rust side of the interface from the varlink file, which is its only source.
fn main() {
    varlink_generator::cargo_build("src/io.virtiotmem.Control.varlink");
}
