// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Compares the interface file and docs/statistics.md with the table of statistics.
//!
//! With `TMEM_WRITE_DOCS=1`, the test writes the types of the interface file and the tables of the
//! page: `TMEM_WRITE_DOCS=1 cargo test -p tmem-control`.

use crate::statistics::{Export, Kind, Scope, Statistic};
use std::collections::BTreeSet;
use std::path::Path;

const SCOPES: [Scope; 4] = [Scope::Vm, Scope::Driver, Scope::Pool, Scope::Daemon];

/// Returns the fields of a type in the interface file.
fn fields(scope: Scope) -> String {
    let field = |row: &Statistic| format!("  {}: {}", row.field, row.field_type);
    let fields: Vec<String> = Statistic::in_scope(scope).map(field).collect();
    fields.join(",\n") + "\n"
}

/// Returns a table of the page.
fn table(scope: Scope) -> String {
    let mut text = String::from(
        "| value | metric | kind | unit | meaning |\n| --- | --- | --- | --- | --- |\n",
    );
    for row in Statistic::in_scope(scope) {
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
        "{file} differs from the table of statistics. Set TMEM_WRITE_DOCS=1, or paste:\n{}",
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

/// Words in names of statistics and metrics that have their usual meaning, so that the glossary
/// does not define them. Names of other projects, such as `zstd`, are among them.
const USUAL_WORDS: &str = "arc available avoided background bytes cause configured connected \
    connections cpu daemon disk domain driver dropped duration file hash host interrupts kernel \
    keys less locked lost max memory more moved ms name other percent pid read reason request \
    resident seconds seen size start state systems time tmem uptime use uuid version vm vms zstd";

/// Returns whether two words are forms of one word, such as "evicted" and "eviction".
fn same_word(a: &str, b: &str) -> bool {
    let common = a.bytes().zip(b.bytes()).take_while(|(a, b)| a == b).count();
    let shorter = a.len().min(b.len());
    common == shorter || (common >= 4 && common + 3 >= shorter)
}

#[test]
fn glossary_has_each_term_of_the_names_of_statistics_and_metrics() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/glossary.md");
    let glossary = std::fs::read_to_string(path).expect("cannot read docs/glossary.md");
    let entries = glossary
        .lines()
        .filter_map(|line| line.strip_prefix("- **"));
    let terms: Vec<String> = entries
        .filter_map(|line| Some(line.split_once("**")?.0.to_lowercase()))
        .collect();
    let words = |text: &str| -> Vec<String> {
        let words = text.split(|c: char| !c.is_ascii_alphabetic());
        words
            .filter(|word| !word.is_empty())
            .map(String::from)
            .collect()
    };
    let known: Vec<String> = terms.iter().flat_map(|term| words(term)).collect();
    let is_defined = |word: &String| {
        USUAL_WORDS.split_whitespace().any(|usual| usual == word)
            || known.iter().any(|known| same_word(known, word))
    };
    let names = Statistic::all().flat_map(|row| words(&format!("{} {}", row.field, row.metric)));
    let undefined: BTreeSet<String> = names.filter(|word| !is_defined(word)).collect();
    assert!(
        undefined.is_empty(),
        "docs/glossary.md has no term with these words of statistics and metrics: {undefined:?}"
    );
}
