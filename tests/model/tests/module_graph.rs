// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checks that neither the files nor the directories of a crate in host-daemon/ import each other
//! in a cycle.
//!
//! `lib.rs` and `main.rs` are exempt, because they declare the other files, and so is the `mod.rs` of
//! a directory inside this directory. Tests are exempt, because they may use any part of the crate:
//! the test module at the end of a file, files `*_test.rs`, and directories `tests` and `*_test`.
//! Limit: the search reads the text, so it knows only paths that begin with `crate::` or `super::`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Names of the modules that each module imports, such as `top::view`.
type Graph = BTreeMap<String, BTreeSet<String>>;

#[test]
fn files_and_directories_of_each_crate_have_no_import_cycle() {
    let crates = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../host-daemon"));
    let mut checked = 0;
    for entry in std::fs::read_dir(crates).expect("cannot list host-daemon/") {
        let directory = entry.expect("cannot read a directory entry").path();
        if !directory.join("src").is_dir() {
            continue;
        }
        let mut files = BTreeMap::new();
        read_modules(&directory.join("src"), "", &mut files);
        let graph = graph(&files);
        assert_eq!(cycle(&graph), None, "{}", directory.display());
        assert_eq!(cycle(&directories(&graph)), None, "{}", directory.display());
        checked += 1;
    }
    assert!(checked > 5, "only {checked} crates were found");
}

/// Returns the import graph between the modules of the crate's root: files and directories.
fn directories(graph: &Graph) -> Graph {
    let root = |name: &str| name.split("::").next().unwrap_or("").to_owned();
    let mut found = Graph::new();
    for (name, imported) in graph {
        let others = imported.iter().map(|other| root(other));
        let others = others.filter(|other| *other != root(name));
        found.entry(root(name)).or_default().extend(others);
    }
    found
}

/// Reads the sources of the directory `path`, whose module is `parent`, by the names of their
/// modules. Leaves out `lib.rs`, `main.rs` and tests.
fn read_modules(path: &Path, parent: &str, files: &mut BTreeMap<String, String>) {
    for entry in std::fs::read_dir(path).expect("cannot list the source directory") {
        let entry = entry.expect("cannot read a directory entry").path();
        let stem = entry.file_stem().unwrap_or_default().to_string_lossy();
        let name = match (parent, &*stem) {
            (_, "mod") => parent.to_owned(),
            ("", stem) => stem.to_owned(),
            (parent, stem) => format!("{parent}::{stem}"),
        };
        if stem == "tests" || stem.ends_with("_test") {
            continue;
        }
        if entry.is_dir() {
            read_modules(&entry, &name, files);
        } else if !matches!(&*name, "lib" | "main") && entry.extension().is_some_and(|e| e == "rs")
        {
            let text = std::fs::read_to_string(&entry).expect("cannot read the source file");
            files.insert(name, text);
        }
    }
}

/// Returns the import graph of the modules in `files`, which has the text of each.
fn graph(files: &BTreeMap<String, String>) -> Graph {
    let parent = |name: &str| name.rsplit_once("::").map(|(parent, _)| parent.to_owned());
    let mut graph = Graph::new();
    for (name, text) in files {
        let above = parent(name);
        let (from_root, from_parent) = imports(text);
        let from_parent = from_parent.into_iter().map(|path| match &above {
            Some(above) => format!("{above}::{path}"),
            None => path,
        });
        // A path may end with the names of items: the module is its longest part with a file.
        let module = |path: String| {
            let mut path = Some(path);
            while let Some(name) = &path
                && !files.contains_key(name)
            {
                path = parent(name);
            }
            path
        };
        let imported = from_root.into_iter().chain(from_parent).filter_map(module);
        // Inside a directory, its `mod.rs` is exempt.
        let is_inside = |a: &str, b: &str| a == b || a.starts_with(&format!("{b}::"));
        let imported = imported.filter(|other| !is_inside(name, other) && !is_inside(other, name));
        graph.entry(name.clone()).or_default().extend(imported);
    }
    graph
}

/// Returns the paths that a source file imports: those after `crate::`, and those after `super::`.
/// Ignores comments and the test module.
fn imports(source: &str) -> (Vec<String>, Vec<String>) {
    let is_test = |line: &str| line.starts_with("#[cfg(") && line.contains("test");
    let is_module = |line: &str| line.contains("mod ") && line.ends_with('{');
    let lines: Vec<&str> = source.lines().collect();
    let is_test_module =
        |at: usize| is_test(lines[at]) && lines.get(at + 1).is_some_and(|line| is_module(line));
    let end = (0..lines.len()).find(|at| is_test_module(*at));
    let code: Vec<&str> = lines[..end.unwrap_or(lines.len())]
        .iter()
        .filter(|line| !line.trim().starts_with("//"))
        .copied()
        .collect();
    let code = code.join("\n");
    let paths = |prefix| {
        let texts = code.split(prefix).skip(1);
        texts.flat_map(expand).collect()
    };
    (paths("crate::"), paths("super::"))
}

/// Returns the paths at the start of `text`: one, or those of a group such as `a::{b, c::d}`.
/// Expands the outermost group only, whose members begin with their modules.
fn expand(text: &str) -> Vec<String> {
    let is_path = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
    let path = |text: &str| -> String { text.trim().chars().take_while(|c| is_path(*c)).collect() };
    let first = path(text);
    let Some(group) = text[first.len()..].strip_prefix('{') else {
        return vec![first];
    };
    let mut depth = 1;
    let inside: String = group
        .chars()
        .take_while(|c| {
            depth += i32::from(*c == '{') - i32::from(*c == '}');
            depth > 0
        })
        .collect();
    let members = inside.split([',', '{', '}']);
    members
        .map(|member| first.clone() + &path(member))
        .collect()
}

/// Returns a cycle of the graph, or None if it has no cycle.
fn cycle(graph: &Graph) -> Option<Vec<String>> {
    fn walk(graph: &Graph, path: &mut Vec<String>, done: &mut BTreeSet<String>) -> bool {
        let node = path.last().cloned().unwrap_or_default();
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
        let found = walk(graph, &mut path, &mut done);
        found.then(|| {
            let begin = path.iter().position(|node| Some(node) == path.last());
            path.split_off(begin.unwrap_or(0))
        })
    })
}

mod examples {
    use super::*;

    fn found(files: &[(&str, &str)]) -> Option<Vec<String>> {
        let named = |(name, text): &(&str, &str)| (name.to_string(), text.to_string());
        cycle(&graph(&files.iter().map(named).collect()))
    }

    #[test]
    fn a_cycle_of_imports_is_found() {
        let a = ("a", "use crate::{c, b::{D, E}};");
        let b = ("b", "// crate::a\nuse std::io;\n");
        let c = (
            "c",
            "fn f() { crate::b::g() }\n#[cfg(test)]\npub mod tests {\n use crate::a::h;\n}",
        );
        assert_eq!(found(&[a, b, c]), None);
        let b = ("b", "fn f() { crate::a::g() }");
        assert!(found(&[a, b, c]).is_some_and(|cycle| cycle.len() > 2));
        assert_eq!(
            found(&[("d", "use crate::e::F;"), ("e", "use crate::d;")]),
            Some(["d", "e", "d"].map(String::from).to_vec())
        );
    }

    #[test]
    fn a_cycle_between_directories_is_found() {
        let files = [
            ("top", "mod view;"),
            (
                "top::view",
                "use super::model::Model;\nuse crate::low::Low;",
            ),
            ("top::model", ""),
            ("low", "use crate::top::model;"),
        ];
        assert_eq!(found(&files), None);
        let named = |(name, text): &(&str, &str)| (name.to_string(), text.to_string());
        let graph = graph(&files.iter().map(named).collect());
        assert!(cycle(&directories(&graph)).is_some());
    }
}
