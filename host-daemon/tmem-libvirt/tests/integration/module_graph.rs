// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checks that the files of the crate's library do not import each other in a cycle.

use std::path::Path;

#[test]
fn source_files_have_no_import_cycle() {
    let source = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/src"));
    assert_eq!(tmem_model::module_graph::import_cycle(source), None);
}
