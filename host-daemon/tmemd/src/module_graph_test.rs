// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checks that neither the files nor the directories of the crate import each other in a cycle.
//!
//! Test modules are exempt: a test may use any part of the crate. `lib.rs` and `main.rs` are exempt
//! because they are the roots that name every other file.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

type Graph = BTreeMap<String, BTreeSet<String>>;

/// Returns the names of the files and subdirectories of `directory`, without the suffix `.rs`.
fn names(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).expect("cannot list the source directory");
    let name = |entry: std::io::Result<std::fs::DirEntry>| {
        let name = entry.expect("cannot read a directory entry").file_name();
        name.to_string_lossy().trim_end_matches(".rs").to_owned()
    };
    entries.map(name).collect()
}

/// Returns each path that follows `crate::` in the text of a source file, split into its
/// identifiers. Comments and test modules of the file are ignored.
fn imports(source: &str) -> Vec<Vec<&str>> {
    let code = source.split("#[cfg(test)]\nmod ").next().unwrap_or("");
    let lines = code.lines().filter(|line| !line.trim().starts_with("//"));
    let paths = lines.flat_map(|line| line.split("crate::").skip(1));
    paths
        .map(|text| text.split("::").take(3).map(identifier).collect())
        .collect()
}

/// Returns the Rust identifier with which a text starts.
fn identifier(text: &str) -> &str {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    text.split(|c| !is_part(c)).next().unwrap_or("")
}

/// Returns a cycle of the import graph as a list of its nodes, or None if the graph has no cycle.
fn cycle(graph: &Graph) -> Option<Vec<String>> {
    fn walk(graph: &Graph, path: &mut Vec<String>, done: &mut BTreeSet<String>) -> bool {
        let node = path
            .last()
            .expect("the path of the search has no node")
            .clone();
        for next in graph.get(&node).into_iter().flatten() {
            let is_cycle = path.contains(next);
            path.push(next.clone());
            if is_cycle || (!done.contains(next) && walk(graph, path, done)) {
                return true;
            }
            path.pop();
        }
        done.insert(node);
        false
    }
    let mut done = BTreeSet::new();
    graph.keys().find_map(|node| {
        let mut path = vec![node.clone()];
        walk(graph, &mut path, &mut done).then_some(path)
    })
}

#[test]
fn the_search_for_import_cycles_finds_a_cycle() {
    let edge = |from: &str, to: &str| (from.to_owned(), BTreeSet::from([to.to_owned()]));
    let mut graph = Graph::from([edge("a", "b"), edge("b", "c"), edge("d", "b")]);
    assert_eq!(cycle(&graph), None);
    graph.extend([edge("c", "a")]);
    assert_eq!(
        cycle(&graph).expect("the cycle of the graph was not found"),
        ["a", "b", "c", "a"]
    );
    let source = "use crate::a::b::{C, D};\n// crate::e::f\nfn f() { crate::g::h::i() }\n\
                  #[cfg(test)]\nmod tests {\n use crate::j::k;\n}";
    let found = imports(source);
    assert_eq!(found, [["a", "b", ""].as_slice(), &["g", "h", "i"]]);
}

#[test]
fn source_files_and_directories_have_no_import_cycle() {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/src"));
    let (mut files, mut directories) = (Graph::new(), Graph::new());
    let is_directory = |name: &String| root.join(name).is_dir();
    for directory in names(root).into_iter().filter(is_directory) {
        for file in names(&root.join(&directory)) {
            if file.ends_with("_test") {
                continue;
            }
            let name = format!("{directory}::{file}");
            let source = std::fs::read_to_string(root.join(&directory).join(format!("{file}.rs")));
            let source = source.expect("cannot read the source file");
            assert!(
                !source.contains("super::super::"),
                "{name} imports from super::super"
            );
            for import in imports(&source) {
                let (to, to_file) = (import[0], import.get(1).copied().unwrap_or(""));
                let target = root.join(to).join(format!("{to_file}.rs"));
                let shown = import.join("::");
                assert!(
                    target.is_file(),
                    "{name} imports crate::{shown}, which names no file"
                );
                let files = files.entry(name.clone()).or_default();
                files.insert(format!("{to}::{to_file}"));
                if to != directory {
                    directories
                        .entry(directory.clone())
                        .or_default()
                        .insert(to.into());
                }
            }
        }
    }
    assert!(
        files.len() > 30,
        "the imports of only {} files were found: {files:?}",
        files.len()
    );
    for graph in [files, directories] {
        assert_eq!(
            cycle(&graph),
            None,
            "the modules of tmemd import each other in a cycle"
        );
    }
}
