// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checks that neither the files nor the directories of tmemd and of tmem-pool import each other in
//! a cycle.
//!
//! Test modules are exempt: a test may use any part of its crate. `lib.rs` and `main.rs` are exempt
//! because they are the roots that name every other file. The `mod.rs` of a directory is exempt
//! as the root of the files in this directory.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

type Graph = BTreeMap<String, BTreeSet<String>>;

/// Import graphs of a crate. A node of `files` is a path such as `queue::vring`, and a node of
/// `modules` is a module of the crate's root: a directory, or a file outside of directories.
#[derive(Default)]
struct Graphs {
    files: Graph,
    modules: Graph,
}

/// Returns the names of the files and subdirectories of `directory`, without the suffix `.rs` and
/// without tests.
fn names(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).expect("cannot list the source directory");
    let name = |entry: std::io::Result<std::fs::DirEntry>| {
        let name = entry.expect("cannot read a directory entry").file_name();
        name.to_string_lossy().trim_end_matches(".rs").to_owned()
    };
    let is_test = |name: &String| name == "tests" || name.ends_with("_test");
    entries.map(name).filter(|name| !is_test(name)).collect()
}

/// Returns each path that follows `crate::` in the text of a source file, split into its
/// identifiers. In a file of a directory, `super::` stands for `crate::` and the directory.
/// Comments and test modules of the file are ignored.
fn imports<'a>(source: &'a str, directory: Option<&'a str>) -> Vec<Vec<&'a str>> {
    let code = source.split("#[cfg(test)]\nmod ").next().unwrap_or("");
    let lines = code.lines().filter(|line| !line.trim().starts_with("//"));
    let follows = |root: &'static str| {
        let paths = lines.clone().flat_map(move |line| line.split(root).skip(1));
        paths.map(|text| text.split("::").take(3).map(identifier))
    };
    let absolute = follows("crate::").map(Iterator::collect);
    let relative = directory.into_iter().flat_map(|directory| {
        follows("super::").map(move |path| std::iter::once(directory).chain(path).collect())
    });
    absolute.chain(relative).collect()
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
    let found = imports(source, None);
    assert_eq!(found, [["a", "b", ""].as_slice(), &["g", "h", "i"]]);
    assert_eq!(imports("use super::b::C;", Some("a")), [["a", "b", "C"]]);
}

impl Graphs {
    /// Returns the import graphs of the crate whose sources are in `root`.
    fn of(root: &Path) -> Graphs {
        let mut graphs = Graphs::default();
        for module in names(root) {
            if root.join(&module).is_dir() {
                for file in names(&root.join(&module)) {
                    graphs.add(root, Some(&module), &file);
                }
            } else if module != "lib" && module != "main" {
                graphs.add(root, None, &module);
            }
        }
        graphs
    }

    /// Adds the imports of a source file to the graphs.
    fn add(&mut self, root: &Path, directory: Option<&str>, file: &str) {
        let module = directory.unwrap_or(file);
        let path = match directory {
            Some(directory) => root.join(directory).join(file),
            None => root.join(file),
        };
        let name = directory.map_or(file.into(), |directory| format!("{directory}::{file}"));
        let source = std::fs::read_to_string(path.with_extension("rs"));
        let source = source.expect("cannot read the source file");
        assert!(
            !source.contains("super::super::"),
            "{name} imports from super::super"
        );
        for import in imports(&source, directory.filter(|_| file != "mod")) {
            let (to, to_file) = (import[0], import.get(1).copied().unwrap_or(""));
            let is_file = |path: &str| root.join(path).with_extension("rs").is_file();
            let target = [format!("{to}/{to_file}"), to.into(), format!("{to}/mod")];
            let target = target.into_iter().find(|path| is_file(path));
            let target = target.unwrap_or_else(|| {
                let shown = import.join("::");
                panic!("{name} imports crate::{shown}, which names no file")
            });
            if to != module {
                let modules = self.modules.entry(module.into()).or_default();
                modules.insert(to.into());
            } else if file == "mod" || target.ends_with("/mod") {
                continue;
            }
            let files = self.files.entry(name.clone()).or_default();
            files.insert(target.replace('/', "::"));
        }
    }
}

#[test]
fn source_files_and_directories_have_no_import_cycle() {
    let crates = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    for (name, files_min) in [("tmemd", 35), ("tmem-pool", 25)] {
        let Graphs { files, modules } = Graphs::of(&crates.join(name).join("src"));
        assert!(
            files.len() > files_min,
            "the imports of only {} files of {name} were found: {files:?}",
            files.len()
        );
        for graph in [files, modules] {
            assert_eq!(
                cycle(&graph),
                None,
                "the modules of {name} import each other in a cycle"
            );
        }
    }
}
