// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Formats tables with aligned columns, sizes with units, and ratios.

/// Column alignment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Align {
    /// Text.
    Left,
    /// Numbers.
    Right,
}

/// Formats lines of equal columns, separated by two blanks, without trailing blanks.
pub fn table(columns: &[(&str, Align)], rows: &[Vec<String>]) -> String {
    let heads: Vec<String> = columns.iter().map(|(head, _)| head.to_string()).collect();
    let lines: Vec<&Vec<String>> = std::iter::once(&heads).chain(rows).collect();
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

/// Formats a size with three digits and a binary unit.
pub fn size(bytes: i64) -> String {
    let mut value = bytes as f64;
    let mut unit = "B";
    for next in ["KiB", "MiB", "GiB", "TiB"] {
        // Values from 999.5 on would be rounded to 1000, so they get the next unit.
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
    fn columns_line_up() {
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
    fn sizes_have_three_digits() {
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
