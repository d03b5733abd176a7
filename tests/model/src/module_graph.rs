// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Finds import cycles between the source files of a crate, so that each crate can test that it has
//! none.
//!
//! A file `directory/mod.rs` imports each file of its directory, because it declares them. `lib.rs`
//! and `main.rs` are exempt for the same reason. Tests are exempt, because they may use any part of
//! the crate: the test module at the end of a file, files `*_test.rs`, and directories `tests` and
//! `*_test`. Limit: the search reads the text, so it knows only paths that begin with `crate::` or
//! `super::`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Names of the modules that each module imports, such as `top::view`.
type Graph = BTreeMap<String, BTreeSet<String>>;

/// Returns an import cycle between the files of the source directory `root`, as a list of modules
/// that begins and ends with the same one; None if there is no cycle.
pub fn import_cycle(root: &Path) -> Option<Vec<String>> {
    let mut files = BTreeMap::new();
    read_modules(root, "", &mut files);
    cycle(&graph(&files))
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
        let imported = imported.filter(|other| other != name);
        graph.entry(name.clone()).or_default().extend(imported);
        if let Some(above) = above {
            graph.entry(above).or_default().insert(name.clone());
        }
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

#[cfg(test)]
mod tests {
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
    fn a_file_that_imports_from_its_directory_is_in_a_cycle() {
        let top = ("top", "mod model;\nmod view;");
        let view = ("top::view", "use super::model::Model;");
        let model = ("top::model", "");
        assert_eq!(found(&[top, view, model]), None);
        let view = ("top::view", "use super::Model;");
        assert!(found(&[top, view, model]).is_some());
    }
}
