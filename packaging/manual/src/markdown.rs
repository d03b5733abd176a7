// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Converts the Markdown of `docs/` to roff: headings, paragraphs, lists, tables and code.
//!
//! A row of a table becomes an entry of a list. The first cell is the term of the entry, and the
//! last cell is its text. A cell between them is written after the heading of its column. Out of
//! scope: pictures, HTML, quotations.

use pulldown_cmark::{Event, HeadingLevel, Options, Parser, Tag, TagEnd};
use roff::{Inline, Roff, bold, italic, roman};
use std::error::Error;
use std::path::Path;

/// Indentation of code in columns.
const CODE_INDENT: &str = "4";

/// Converts a Markdown page to roff, without its title.
///
/// # Errors
/// The file cannot be read, or has a construct that this module cannot convert.
pub fn page(path: &Path) -> Result<Roff, Box<dyn Error>> {
    let text = std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
    Converter::new(HeadingLevel::H1)
        .convert(&text)
        .map_err(|what| format!("{}: {what}", path.display()).into())
}

/// Converts one section of a Markdown page to roff, without its heading `heading`.
///
/// # Errors
/// The file cannot be read, has no such heading, or has a construct that this module cannot
/// convert.
pub fn section(path: &Path, heading: &str) -> Result<Roff, Box<dyn Error>> {
    let text = std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
    let begin = format!("\n## {heading}\n");
    let Some((_, text)) = text.split_once(&begin) else {
        return Err(format!("{}: no section {heading:?}", path.display()).into());
    };
    let text = text.split("\n## ").next().unwrap_or_default();
    Converter::new(HeadingLevel::H2)
        .convert(text)
        .map_err(|what| format!("{}: {what}", path.display()).into())
}

/// State of the conversion of one Markdown page.
struct Converter {
    page: Roff,
    /// Level of the Markdown heading to which the converted text belongs.
    base: HeadingLevel,
    /// Text of the current paragraph, cell or heading.
    line: Vec<Inline>,
    /// Emphasis of the text: 0 none, 1 italic, 2 bold.
    emphasis: u8,
    /// Lists that are open, outermost first. Each has the number of its next item, or None if it
    /// has bullets.
    lists: Vec<Option<u64>>,
    /// Whether the next paragraph is the first one of a list item, which needs no roff request of
    /// its own.
    begins_item: bool,
    /// Text of the code block that is open, if any.
    code: Option<String>,
    /// Cells of the current table row, as far as they are converted.
    row: Vec<Vec<Inline>>,
    /// Column headings of the current table, as text.
    headings: Vec<String>,
}

impl Converter {
    fn new(base: HeadingLevel) -> Converter {
        Converter {
            page: Roff::new(),
            base,
            line: Vec::new(),
            emphasis: 0,
            lists: Vec::new(),
            begins_item: false,
            code: None,
            row: Vec::new(),
            headings: Vec::new(),
        }
    }

    fn convert(mut self, text: &str) -> Result<Roff, String> {
        for event in Parser::new_ext(text, Options::ENABLE_TABLES) {
            self.event(event)?;
        }
        Ok(self.page)
    }

    fn event(&mut self, event: Event) -> Result<(), String> {
        match event {
            Event::Start(tag) => return self.start(tag),
            Event::End(tag) => self.end(tag),
            Event::Text(text) => match &mut self.code {
                Some(code) => code.push_str(&text),
                None => self.line.push(match self.emphasis {
                    0 => roman(&*text),
                    1 => italic(&*text),
                    _ => bold(&*text),
                }),
            },
            Event::Code(text) => self.line.push(bold(&*text)),
            Event::SoftBreak | Event::HardBreak => self.line.push(roman(" ")),
            // Leave out HTML comments. Any other HTML is an error.
            Event::Html(text) if text.starts_with("<!--") => {}
            other => return Err(format!("cannot convert {other:?}")),
        }
        Ok(())
    }

    fn start(&mut self, tag: Tag) -> Result<(), String> {
        match tag {
            Tag::Paragraph if self.begins_item => self.begins_item = false,
            // Outside of lists, begin a paragraph with the roff request PP. In lists, use IP
            // without a tag, which keeps the indentation of the list item.
            Tag::Paragraph if self.lists.is_empty() => self.request("PP", &[]),
            Tag::Paragraph => self.request("IP", &[]),
            Tag::Heading { .. } | Tag::TableRow | Tag::TableCell | Tag::Link { .. } => {}
            Tag::Table(_) => self.flush(),
            Tag::TableHead => self.headings.clear(),
            Tag::Emphasis => self.emphasis += 1,
            Tag::Strong => self.emphasis += 2,
            Tag::CodeBlock(_) => {
                self.flush();
                self.code = Some(String::new());
            }
            Tag::List(first) => {
                self.flush();
                if !self.lists.is_empty() {
                    self.request("RS", &[]);
                }
                self.lists.push(first);
            }
            Tag::Item => {
                self.flush();
                match self.lists.last_mut() {
                    Some(Some(number)) => {
                        let label = format!("{number}.");
                        *number += 1;
                        self.request("IP", &[&label, "4"]);
                    }
                    _ => self.request("IP", &["\\(bu", "2"]),
                }
                self.begins_item = true;
            }
            Tag::HtmlBlock => {}
            other => return Err(format!("cannot convert {other:?}")),
        }
        Ok(())
    }

    fn end(&mut self, tag: TagEnd) {
        match tag {
            TagEnd::Paragraph => self.flush(),
            TagEnd::Item => {
                self.flush();
                self.begins_item = false;
            }
            TagEnd::List(_) => {
                self.lists.pop();
                if !self.lists.is_empty() {
                    self.request("RE", &[]);
                }
            }
            TagEnd::Heading(level) => {
                let text = plain(&std::mem::take(&mut self.line));
                match level {
                    _ if level <= self.base => {}
                    _ if level as usize == self.base as usize + 1 => {
                        self.request("SH", &[&text.to_uppercase()]);
                    }
                    _ => self.request("SS", &[&text]),
                }
            }
            TagEnd::CodeBlock => {
                let code = self.code.take().unwrap_or_default();
                self.request("PP", &[]);
                self.request("RS", &[CODE_INDENT]);
                self.request("nf", &[]);
                for line in code.lines() {
                    self.page.text([roman(line)]);
                }
                self.request("fi", &[]);
                self.request("RE", &[]);
            }
            TagEnd::TableCell => self.row.push(std::mem::take(&mut self.line)),
            TagEnd::TableHead => {
                self.headings = self.row.drain(..).map(|cell| plain(&cell)).collect();
            }
            TagEnd::TableRow => self.end_row(),
            TagEnd::Emphasis => self.emphasis -= 1,
            TagEnd::Strong => self.emphasis -= 2,
            _ => {}
        }
    }

    /// Writes the current table row as an entry of a list.
    fn end_row(&mut self) {
        let mut cells = std::mem::take(&mut self.row).into_iter();
        self.request("TP", &[]);
        self.page.text(cells.next().unwrap_or_default());
        let text = cells.next_back().unwrap_or_default();
        let mut between = Vec::new();
        for (heading, cell) in self.headings.iter().skip(1).zip(cells) {
            if !cell.is_empty() {
                let separator = if between.is_empty() { "" } else { "; " };
                between.push(roman(format!("{separator}{heading}: ")));
                between.extend(cell);
            }
        }
        if !between.is_empty() {
            between.push(roman("."));
            self.page.text(between);
            self.request("br", &[]);
        }
        self.page.text(text);
    }

    fn request(&mut self, name: &str, arguments: &[&str]) {
        self.page.control(name, arguments.iter().copied());
    }

    /// Writes the text of the current paragraph, cell or heading to the page, and clears it.
    fn flush(&mut self) {
        if !self.line.is_empty() {
            self.page.text(std::mem::take(&mut self.line));
        }
    }
}

/// Returns the text of a line without its changes of fonts.
fn plain(line: &[Inline]) -> String {
    line.iter()
        .map(|part| match part {
            Inline::Roman(text) | Inline::Italic(text) | Inline::Bold(text) => text.as_str(),
            Inline::LineBreak => " ",
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn convert(text: &str) -> String {
        let page = Converter::new(HeadingLevel::H1).convert(text);
        page.expect("the Markdown text cannot be converted")
            .to_roff()
    }

    #[test]
    fn paragraphs_and_headings_are_converted() {
        let page =
            convert("<!-- c -->\n# Title\n\nOne `two`\n**three** [four](x.md).\n\n## Five six\n");
        assert_eq!(
            page,
            ".PP\nOne \\fBtwo\\fR \\fBthree\\fR four.\n.SH \"FIVE SIX\"\n"
        );
    }

    #[test]
    fn lists_and_code_are_converted() {
        let page = convert("- a\n  b\n- c\n\n1. d\n\n```\n.e -f\n```\n");
        let lists = ".IP \\(bu 2\na b\n.IP \\(bu 2\nc\n.IP 1. 4\nd\n";
        let code = ".PP\n.RS 4\n.nf\n\\&.e \\-f\n.fi\n.RE\n";
        assert_eq!(page, format!("{lists}{code}"));
    }

    #[test]
    fn a_row_of_a_table_is_converted_to_an_entry() {
        let page =
            convert("| key | unit | | text |\n| --- | --- | --- | --- |\n| `a` | b | | c |\n");
        assert_eq!(page, ".TP\n\\fBa\\fR\nunit: b.\n.br\nc\n");
    }

    #[test]
    fn an_unsupported_markdown_construct_is_an_error() {
        let done = Converter::new(HeadingLevel::H1).convert("> quoted\n");
        assert!(
            done.expect_err("a quotation was accepted")
                .contains("BlockQuote")
        );
    }
}
