// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Compares this crate with the C header `virtio_tmem.h`, in both directions.
//!
//! The test reads all names from the header, so that the crate cannot lack one. The sizes, offsets
//! and values come from the C compiler, so that the test does not depend on its own reading of C.

use std::collections::{BTreeMap, BTreeSet};
use std::format;
use std::path::Path;
use std::process::Command;
use std::string::{String, ToString};
use std::vec::Vec;

/// Name, size and fields of a wire struct of this crate, to be compared with the C header.
pub(crate) struct Struct {
    pub c_name: &'static str,
    pub size: usize,
    pub fields: &'static [Field],
}

/// Name, place, size and type of a field of a wire struct of this crate.
pub(crate) struct Field {
    pub name: &'static str,
    pub offset: usize,
    pub size: usize,
    pub rust_type: &'static str,
}

const HEADER: &str = include_str!("../virtio_tmem.h");

/// Names that the C header defines: constants, and structs with their fields. A field has its C
/// type, including an array length, and its name.
#[derive(Debug, Default, PartialEq)]
struct Names {
    defines: Vec<String>,
    structs: Vec<(String, Vec<(String, String)>)>,
}

/// Reads the names that a C header defines. A construct that this function does not know is an
/// error, so that it overlooks no name.
fn names(header: &str) -> Result<Names, String> {
    let mut text = String::new();
    let mut rest = header;
    while let Some((code, comment)) = rest.split_once("/*") {
        text.push_str(code);
        rest = comment.split_once("*/").ok_or("comment without an end")?.1;
    }
    text.push_str(rest);

    let mut found = Names::default();
    let mut fields: Option<Vec<(String, String)>> = None;
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let words: Vec<&str> = line.split_whitespace().collect();
        match (&mut fields, words.as_slice()) {
            (None, ["#ifndef" | "#define", "VIRTIO_TMEM_H"] | ["#endif"]) => {}
            (None, ["#include", "<linux/types.h>"]) => {}
            (None, ["#define", name, _, ..]) if !name.contains('(') => {
                found.defines.push(name.to_string());
            }
            (None, ["struct", name, "{"]) => {
                found.structs.push((name.to_string(), Vec::new()));
                fields = Some(Vec::new());
            }
            (Some(list), [c_type, field]) if field.ends_with(';') => {
                let field = field.trim_end_matches(';');
                let (name, length) = match field.split_once('[') {
                    Some((name, length)) => (name, format!("[{length}")),
                    None => (field, String::new()),
                };
                list.push((format!("{c_type}{length}"), name.to_string()));
            }
            (Some(_), ["};"]) => {
                found
                    .structs
                    .last_mut()
                    .expect("a struct ends before any struct begins")
                    .1 = fields.take().expect("a struct has no list of fields");
            }
            _ => return Err(format!("unknown declaration in the header: {line}")),
        }
    }
    Ok(found)
}

/// Compiles and runs a C program that prints the sizes, offsets and values of the header. Each line
/// of its output is `name value...`. Returns the values by name.
fn measure(names: &Names, purpose: &str) -> BTreeMap<String, Vec<u64>> {
    let mut program = String::from(
        "#include <stddef.h>\n#include <stdio.h>\n#include \"virtio_tmem.h\"\nint main(void)\n{\n",
    );
    for define in &names.defines {
        program += &format!("printf(\"{define} %llu\\n\", (unsigned long long)({define}));\n");
    }
    for (name, fields) in &names.structs {
        program += &format!("printf(\"{name} %zu\\n\", sizeof(struct {name}));\n");
        for (_, field) in fields {
            program += &format!(
                "printf(\"{name}.{field} %zu %zu\\n\", offsetof(struct {name}, {field}), \
                 sizeof(((struct {name} *)0)->{field}));\n"
            );
        }
    }
    program += "return 0;\n}\n";

    let directory =
        std::env::temp_dir().join(format!("virtio-tmem-{purpose}-{}", std::process::id()));
    std::fs::create_dir_all(&directory).expect("cannot create the directory");
    let source = directory.join("abi.c");
    let binary = directory.join("abi");
    std::fs::write(&source, program).expect("cannot write the C program");
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let status = Command::new(&compiler)
        .args(["-Wall", "-Werror", "-I"])
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")))
        .arg(&source)
        .arg("-o")
        .arg(&binary)
        .status()
        .unwrap_or_else(|e| panic!("cannot run the C compiler {compiler}: {e}"));
    assert!(
        status.success(),
        "{compiler} could not compile the program: {status}"
    );
    let output = Command::new(&binary)
        .output()
        .expect("cannot run the C program");
    std::fs::remove_dir_all(&directory).expect("cannot remove the temporary directory");
    assert!(output.status.success());
    String::from_utf8(output.stdout)
        .expect("the text is not UTF-8")
        .lines()
        .map(|line| {
            let mut words = line.split(' ');
            let what = words
                .next()
                .expect("the line begins with a name")
                .to_string();
            (
                what,
                words
                    .map(|word| word.parse().expect("the text is not a number"))
                    .collect(),
            )
        })
        .collect()
}

/// Returns the C type that corresponds to a Rust type of the crate.
fn c_type(rust_type: &str) -> String {
    if let Some(array) = rust_type.strip_prefix('[') {
        let (item, length) = array
            .trim_end_matches(']')
            .split_once(';')
            .expect("the array's length is known");
        return format!("{}[{}]", c_type(item), length.trim());
    }
    match rust_type {
        "u8" => "__u8",
        "U16" => "__le16",
        "U32" => "__le32",
        "U64" => "__le64",
        other => panic!("{other} is not a known C type"),
    }
    .to_string()
}

/// Returns all differences between this crate and a C header, in names, sizes, offsets and values.
/// Each is a sentence.
fn differences(names: &Names, measures: &BTreeMap<String, Vec<u64>>) -> Vec<String> {
    let mut found = Vec::new();
    let mut compare = |what: String, header: Option<&Vec<u64>>, rust: Option<Vec<u64>>| {
        if header != rust.as_ref() {
            found.push(format!(
                "{what}: the header has {header:?}, the crate has {rust:?}"
            ));
        }
    };

    let defines: BTreeMap<&str, u64> = crate::DEFINES.iter().copied().collect();
    let all: BTreeSet<&str> = defines
        .keys()
        .copied()
        .chain(names.defines.iter().map(String::as_str))
        .collect();
    for name in all {
        compare(
            name.into(),
            measures.get(name),
            defines.get(name).map(|value| [*value].into()),
        );
    }

    let structs: BTreeMap<&str, &Struct> = crate::STRUCTS.iter().map(|s| (s.c_name, s)).collect();
    let all: BTreeSet<&str> = structs
        .keys()
        .copied()
        .chain(names.structs.iter().map(|(name, _)| name.as_str()))
        .collect();
    for name in all {
        let rust = structs.get(name);
        compare(
            name.into(),
            measures.get(name),
            rust.map(|s| [s.size as u64].into()),
        );
        let rust: BTreeMap<&str, &Field> = rust
            .map(|s| {
                s.fields
                    .iter()
                    .map(|f| (f.name.trim_start_matches("r#"), f))
                    .collect()
            })
            .unwrap_or_default();
        let header: BTreeMap<&str, &str> = names
            .structs
            .iter()
            .filter(|(other, _)| other == name)
            .flat_map(|(_, fields)| fields.iter().map(|(t, f)| (f.as_str(), t.as_str())))
            .collect();
        for field in rust
            .keys()
            .chain(header.keys())
            .copied()
            .collect::<BTreeSet<_>>()
        {
            let what = format!("{name}.{field}");
            let layout = rust
                .get(field)
                .map(|f| [f.offset as u64, f.size as u64].into());
            compare(what, measures.get(&format!("{name}.{field}")), layout);
        }
    }
    for (name, fields) in &names.structs {
        let Some(rust) = structs.get(name.as_str()) else {
            continue;
        };
        for (header_type, field) in fields {
            let rust = rust
                .fields
                .iter()
                .find(|f| f.name.trim_start_matches("r#") == field);
            if let Some(rust) = rust.filter(|rust| c_type(rust.rust_type) != *header_type) {
                let rust = rust.rust_type;
                found.push(format!(
                    "{name}.{field}: the header has type {header_type}, the crate has {rust}"
                ));
            }
        }
    }
    found
}

#[test]
fn crate_matches_the_c_header() {
    let names = names(HEADER).expect("the header has an unknown declaration");
    let found = differences(&names, &measure(&names, "equals"));
    assert!(
        found.is_empty(),
        "the header and the Rust types differ: {found:#?}"
    );
    assert!(
        names.defines.len() >= 38 && names.structs.len() >= 9,
        "too few definitions were found: {names:?}"
    );
}

/// The comparison of the crate with the header detects each kind of change to the header.
#[test]
fn each_deviation_from_the_c_header_is_detected() {
    let good = names(HEADER).expect("the header has an unknown declaration");
    let measures = measure(&good, "differences");
    let changed = |from: &str, to: &str| {
        assert!(HEADER.contains(from), "the header has no {from:?}");
        names(&HEADER.replace(from, to)).expect("the changed header has an unknown declaration")
    };

    let mut more = measures.clone();
    more.insert("VIRTIO_TMEM_NEW".into(), [1].into());
    let names_more = changed("#endif", "#define VIRTIO_TMEM_NEW 1\n#endif");
    assert_eq!(
        differences(&names_more, &more).len(),
        1,
        "a new define was not reported"
    );

    let mut more = measures.clone();
    more.insert("virtio_tmem_new".into(), [8].into());
    more.insert("virtio_tmem_new.a".into(), [0, 8].into());
    let names_more = changed(
        "#endif",
        "struct virtio_tmem_new {\n\t__le64 a;\n};\n#endif",
    );
    assert_eq!(
        differences(&names_more, &more).len(),
        2,
        "a new struct was not reported with its size"
    );

    let mut more = measures.clone();
    more.insert("virtio_tmem_get.more".into(), [16, 8].into());
    let names_more = changed(
        "struct virtio_tmem_get {",
        "struct virtio_tmem_get {\n__le64 more;",
    );
    assert_eq!(
        differences(&names_more, &more).len(),
        1,
        "a new field was not reported"
    );

    for what in measures.keys() {
        let mut less = measures.clone();
        less.remove(what);
        assert_eq!(
            differences(&good, &less).len(),
            1,
            "the removal of {what} was not reported"
        );
        let mut other = measures.clone();
        *other
            .get_mut(what)
            .expect("the name was measured")
            .last_mut()
            .unwrap_or_else(|| panic!("{what} has no value")) += 1;
        assert_eq!(
            differences(&good, &other).len(),
            1,
            "the change of {what} was not reported"
        );
    }
    let other = changed("__le32 flags;", "__le16 flags;");
    assert_eq!(
        differences(&other, &measures).len(),
        2,
        "a field of another type was not reported in put_page and pool_create"
    );
    for odd in [
        "enum a { B };",
        "typedef int a;",
        "#define A(x) x",
        "union a {",
    ] {
        assert!(names(odd).is_err(), "{odd:?} was accepted");
    }
}
