// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Generates the Rust code of the control interface from the varlink file.

use std::path::PathBuf;
use std::{env, fs};

/// Types of the control interface whose fields are figures (statistics). A daemon of another
/// version may lack some of these fields.
const FIGURES: [&str; 5] = [
    "DaemonStats",
    "DriverReport",
    "Histogram",
    "PoolStats",
    "VmStats",
];

fn main() {
    varlink_generator::cargo_build("src/io.virtiotmem.Control.varlink");

    // The code generator cannot mark a field that may be missing in an answer. So the generated
    // types of figures get the attribute `default`: a missing figure is read as zero. The arguments
    // of requests stay mandatory.
    let directory = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let path = directory.join("io.virtiotmem.Control.rs");
    let mut code = fs::read_to_string(&path).expect("cannot read the generated code");
    for name in FIGURES {
        let head = format!("pub struct r#{name} {{");
        assert_eq!(
            code.matches(&head).count(),
            1,
            "the generated code does not contain {head:?} exactly once"
        );
        let tolerant = format!("# [derive (Default)] # [serde (default)] {head}");
        code = code.replace(&head, &tolerant);
    }
    fs::write(&path, code).expect("cannot write the generated code");
}
