// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Formats tables with aligned columns, sizes with units, and ratios. The options of tables are
//! those of zramctl.

use crate::exit::{Code, Failure};
use clap::Args;

/// Alignment of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Align {
    /// Aligns text to the left.
    Left,
    /// Aligns numbers to the right.
    Right,
}

/// Options of a command that prints a table.
#[derive(Args, Clone, Default)]
pub struct TableArguments {
    /// Print sizes in bytes
    #[arg(short, long)]
    bytes: bool,
    /// Print no headings
    #[arg(short, long)]
    noheadings: bool,
    /// Print only these columns, separated by commas, such as NAME,HITS; the error for an unknown
    /// name lists all columns
    #[arg(short, long, value_name = "LIST", value_delimiter = ',')]
    output: Option<Vec<String>>,
}

impl TableArguments {
    /// Returns the format of sizes that the user chose with or without `--bytes`.
    pub fn sizes(&self) -> Sizes {
        Sizes::new(self.bytes)
    }

    /// Returns false if the user switched the headings off.
    pub fn has_headings(&self) -> bool {
        !self.noheadings
    }

    /// Returns true if the user selected columns with `--output`.
    pub fn has_columns(&self) -> bool {
        self.output.is_some()
    }

    /// Returns true if the user selected columns or switched the headings off. The reader of the
    /// table is then probably a program, so the command prints nothing but the table.
    pub fn is_chosen(&self) -> bool {
        self.noheadings || self.output.is_some()
    }
}

/// Format of sizes in a table: in bytes, or with three digits and a unit.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    in_bytes: bool,
}

impl Sizes {
    /// Creates the format of sizes: in bytes if `in_bytes` is true, otherwise with three digits and
    /// a unit.
    pub fn new(in_bytes: bool) -> Sizes {
        Sizes { in_bytes }
    }

    /// Formats a number of bytes as text in the format `self`.
    pub fn text(self, bytes: i64) -> String {
        match self.in_bytes {
            true => bytes.to_string(),
            false => size(bytes),
        }
    }
}

/// A column of a table with rows of type `T`.
pub struct Column<T> {
    /// Name of the column, in upper case and without blanks.
    pub name: &'static str,
    /// Alignment of the column's cells and heading.
    pub align: Align,
    /// Whether the column is printed if the user does not select columns.
    pub usual: bool,
    /// Function that formats the cell of a row in this column.
    pub cell: fn(&T, Sizes) -> String,
}

/// Creates a column that is printed if the user does not select columns.
pub const fn column<T>(
    name: &'static str,
    align: Align,
    cell: fn(&T, Sizes) -> String,
) -> Column<T> {
    Column {
        name,
        align,
        usual: true,
        cell,
    }
}

/// Formats a table with the columns, headings and sizes that the options select.
///
/// # Errors
/// Fails if `--output` names a column that does not exist.
pub fn choose<T>(
    columns: &[Column<T>],
    rows: &[T],
    arguments: &TableArguments,
) -> Result<String, Failure> {
    let chosen: Vec<&Column<T>> = match &arguments.output {
        None => columns.iter().filter(|column| column.usual).collect(),
        Some(names) => names
            .iter()
            .map(|name| {
                let named = |column: &&Column<T>| column.name.eq_ignore_ascii_case(name);
                columns.iter().find(named).ok_or_else(|| {
                    let all: Vec<&str> = columns.iter().map(|column| column.name).collect();
                    let all = all.join(", ");
                    Failure(
                        format!("--output: there is no column {name:?}: the columns are {all}"),
                        Code::Usage,
                    )
                })
            })
            .collect::<Result<_, _>>()?,
    };
    let heads: Vec<(&str, Align)> = chosen.iter().map(|c| (c.name, c.align)).collect();
    let cells = |row: &T| -> Vec<String> {
        let sizes = arguments.sizes();
        chosen
            .iter()
            .map(|column| (column.cell)(row, sizes))
            .collect()
    };
    let cells: Vec<Vec<String>> = rows.iter().map(cells).collect();
    Ok(lines(&heads, &cells, !arguments.noheadings))
}

/// Formats rows with aligned columns below their headings.
pub fn table(columns: &[(&str, Align)], rows: &[Vec<String>]) -> String {
    lines(columns, rows, true)
}

/// Formats rows as lines whose columns are aligned, separated by two blanks, and have no trailing
/// blanks. With `headings`, the first line has the names of the columns.
fn lines(columns: &[(&str, Align)], rows: &[Vec<String>], headings: bool) -> String {
    let heads: Vec<String> = columns.iter().map(|(head, _)| head.to_string()).collect();
    let heads = headings.then_some(&heads);
    let lines: Vec<&Vec<String>> = heads.into_iter().chain(rows).collect();
    let width = |column: usize| {
        lines
            .iter()
            .map(|line| line[column].chars().count())
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns.len()).map(width).collect();
    let mut text = String::new();
    for line in lines {
        let cells = line
            .iter()
            .zip(&widths)
            .zip(columns)
            .map(|((cell, width), (_, align))| match align {
                Align::Left => format!("{cell:<width$}"),
                Align::Right => format!("{cell:>width$}"),
            });
        text += cells.collect::<Vec<_>>().join("  ").trim_end();
        text.push('\n');
    }
    text
}

/// Formats a line with a name and its value.
pub fn row(key: &str, value: &str) -> String {
    format!("{key:<15}: {value}\n")
}

/// Formats a number of bytes with three digits and a binary unit.
pub fn size(bytes: i64) -> String {
    let mut value = bytes as f64;
    let mut unit = "B";
    for next in ["KiB", "MiB", "GiB", "TiB"] {
        // Values from 999.5 on use the next unit, because three digits would round them to 1000.
        if value.abs() < 999.5 {
            break;
        }
        value /= 1024.0;
        unit = next;
    }
    match unit {
        "B" => format!("{bytes} B"),
        _ if value.abs() < 9.995 => format!("{value:.2} {unit}"),
        _ if value.abs() < 99.95 => format!("{value:.1} {unit}"),
        _ => format!("{value:.0} {unit}"),
    }
}

/// Formats `part` in percent of `whole`, or a dash if `whole` is 0.
pub fn percent(part: i64, whole: i64) -> String {
    if whole == 0 {
        return "-".into();
    }
    format!("{:.1} %", part as f64 * 100.0 / whole as f64)
}

/// Formats `whole` divided by `part`, or a dash if `part` is 0.
pub fn ratio(whole: i64, part: i64) -> String {
    if part == 0 {
        return "-".into();
    }
    format!("{:.2}", whole as f64 / part as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_columns_are_aligned() {
        let columns = [("NAME", Align::Left), ("PAGES", Align::Right)];
        let rows = [
            vec!["a".to_string(), "12345678".to_string()],
            vec!["long-name".into(), "1".into()],
        ];
        let expected = "NAME          PAGES\na          12345678\nlong-name         1\n";
        assert_eq!(table(&columns, &rows), expected);
        assert_eq!(
            table(&[("A", Align::Left), ("B", Align::Left)], &[]),
            "A  B\n"
        );
    }

    #[test]
    fn columns_are_chosen_by_name() {
        let columns = [
            column("NAME", Align::Left, |row: &(&str, i64), _| row.0.into()),
            column("USED", Align::Right, |row, sizes| sizes.text(row.1)),
        ];
        let rows = [("a", 2048), ("bc", 1)];
        let print = |output: Option<&str>, bytes, noheadings| {
            let output = output.map(|names| names.split(',').map(String::from).collect());
            let arguments = TableArguments {
                bytes,
                noheadings,
                output,
            };
            choose(&columns, &rows, &arguments)
        };
        let text = print(None, false, false).expect("cannot print the default columns");
        assert_eq!(text, "NAME      USED\na     2.00 KiB\nbc         1 B\n");
        let text = print(Some("used,Name"), true, true).expect("cannot print the chosen columns");
        assert_eq!(text, "2048  a\n   1  bc\n");
        let Failure(why, code) =
            print(Some("NAME,SIZE"), false, false).expect_err("an unknown column was accepted");
        assert!(
            why.contains("\"SIZE\"") && why.contains("NAME, USED"),
            "the error does not name the column and the known ones: {why}"
        );
        assert_eq!(code, Code::Usage);
    }

    #[test]
    fn sizes_are_printed_with_three_digits() {
        for (bytes, text) in [
            (0, "0 B"),
            (999, "999 B"),
            (1000, "0.98 KiB"),
            (1024, "1.00 KiB"),
            (10 << 10, "10.0 KiB"),
            (256 << 20, "256 MiB"),
            (1023 << 20, "1.00 GiB"),
            (3 << 40, "3.00 TiB"),
            (5000 << 40, "5000 TiB"),
        ] {
            assert_eq!(size(bytes), text);
        }
    }

    #[test]
    fn division_by_zero_prints_a_dash() {
        assert_eq!((percent(1, 0), ratio(1, 0)), ("-".into(), "-".into()));
        assert_eq!(
            (percent(1, 3), ratio(3, 2)),
            ("33.3 %".into(), "1.50".into())
        );
    }
}
