// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Compares the interface file and docs/statistics.md with the table of statistics.
//!
//! With `TMEM_WRITE_DOCS=1`, the test writes the types of the interface file and the tables of the
//! page: `TMEM_WRITE_DOCS=1 cargo test -p tmem-control`.

use crate::statistics::{Export, Kind, Scope, Statistic};
use std::path::Path;

const SCOPES: [Scope; 4] = [Scope::Vm, Scope::Driver, Scope::Pool, Scope::Daemon];

/// Returns the fields of a type in the interface file.
fn fields(scope: Scope) -> String {
    let field = |row: &Statistic| format!("  {}: {}", row.field, row.field_type);
    let fields: Vec<String> = Statistic::of(scope).map(field).collect();
    fields.join(",\n") + "\n"
}

/// Returns a table of the page.
fn table(scope: Scope) -> String {
    let mut text = String::from(
        "| value | metric | kind | unit | meaning |\n| --- | --- | --- | --- | --- |\n",
    );
    for row in Statistic::of(scope) {
        let suffix = match row.kind {
            Kind::Counter => "_total",
            _ => "",
        };
        let (name, label) = row.metric();
        let label = label.map_or(String::new(), |(key, values)| {
            format!("{{{key}=\"{}\"}}", values.join("\" / \""))
        });
        let metric = match row.export {
            Export::No => String::new(),
            Export::Steps | Export::RestInSteps => format!("`{name}{suffix}{label}` in steps"),
            _ => format!("`{name}{suffix}{label}`"),
        };
        let kind = format!("{:?}", row.kind).to_lowercase();
        text += &format!(
            "| `{}` | {metric} | {kind} | {} | {} |\n",
            row.field, row.unit, row.meaning
        );
    }
    text
}

/// Compares the text between two marks of each type of the control interface with `generate`. The
/// first mark is `begin` with the name of the type instead of `TYPE`.
fn compare(file: &str, begin: &str, end: &str, generate: fn(Scope) -> String) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(file);
    let mut text = std::fs::read_to_string(&path).expect("cannot read the file");
    let mut outdated = Vec::new();
    for scope in SCOPES {
        let begin = begin.replace("TYPE", scope.type_name());
        let from = text.find(&begin).expect("the first mark is missing") + begin.len();
        let to = from + text[from..].find(end).expect("the second mark is missing");
        let generated = generate(scope);
        if text[from..to] != generated {
            text.replace_range(from..to, &generated);
            outdated.push(format!("{begin}{generated}{end}"));
        }
    }
    if std::env::var_os("TMEM_WRITE_DOCS").is_some() {
        std::fs::write(&path, &text).expect("cannot write the file");
        return;
    }
    assert!(
        outdated.is_empty(),
        "{file} differs from the table of statistics. Run this test with TMEM_WRITE_DOCS=1, or paste:\n{}",
        outdated.join("\n")
    );
}

#[test]
fn interface_file_matches_the_table_of_statistics() {
    let file = "host-daemon/tmem-control/src/io.virtiotmem.Control.varlink";
    compare(file, "type TYPE (\n", ")\n", fields);
}

#[test]
fn docs_statistics_md_matches_the_table_of_statistics() {
    let (begin, end) = ("<!-- table TYPE -->\n", "<!-- end -->\n");
    compare("docs/statistics.md", begin, end, table);
}
