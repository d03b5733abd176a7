// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests which crates of the workspace tmemctl links.

use std::collections::BTreeSet;
use std::path::Path;

/// Returns the workspace crates on which the crate `name` depends, by its manifest and without
/// dev-dependencies.
fn dependencies(workspace: &Path, name: &str) -> Vec<String> {
    let manifest = workspace.join(name).join("Cargo.toml");
    let text = std::fs::read_to_string(manifest).expect("cannot read the manifest");
    let mut found = Vec::new();
    let mut linked = false;
    for line in text.lines() {
        if line.starts_with('[') {
            linked = line.contains("dependencies") && !line.contains("dev-dependencies");
        } else if linked && let Some((_, path)) = line.split_once("path = \"../") {
            found.push(
                path.split('"')
                    .next()
                    .expect("the dependency has no path")
                    .to_owned(),
            );
        }
    }
    found
}

/// Returns all workspace crates that the crate `name` links: itself, its dependencies, and their
/// dependencies.
fn linked(workspace: &Path, name: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut next = vec![name.to_owned()];
    while let Some(name) = next.pop() {
        if workspace.join(&name).is_dir() && found.insert(name.clone()) {
            next.extend(dependencies(workspace, &name));
        }
    }
    found
}

#[test]
fn tmemctl_does_not_link_the_engine() {
    let workspace = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let tmemctl = linked(workspace, "tmemctl");
    assert!(
        tmemctl.contains("tmem-trace"),
        "tmemctl does not link tmem-trace: {tmemctl:?}"
    );
    assert!(
        !tmemctl.contains("tmem-pool"),
        "tmemctl links the engine: {tmemctl:?}"
    );
    assert!(linked(workspace, "tmemd").contains("tmem-pool"));
}
