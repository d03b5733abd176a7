// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Edits a domain's XML at the positions of its nodes, so that all other text stays unchanged.
//!
//! The functions insert an element with a line break and blanks before it. When they remove the
//! element, they remove that line break and those blanks, too.

use super::names::QEMU_NAMESPACE;
use roxmltree::{Attribute, Node};
use std::ops::Range;

/// Number of blanks by which libvirt indents each level of a domain's XML.
const INDENT: usize = 2;

/// A change of a text: the range of bytes to replace, and the text that replaces it.
pub struct Splice(pub Range<usize>, pub String);

/// Returns the text with all splices applied. The splices' ranges must not overlap. Splices that
/// start at the same position are applied in the given order.
pub fn apply(text: &str, mut splices: Vec<Splice>) -> String {
    splices.sort_by_key(|Splice(range, _)| range.start);
    let (mut result, mut at) = (String::with_capacity(text.len() + 1024), 0);
    for Splice(range, instead) in splices {
        result += &text[at..range.start];
        result += &instead;
        at = range.end;
    }
    result + &text[at..]
}

/// Escapes text for an element or for a quoted attribute value.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('\'', "&apos;")
        .replace('"', "&quot;")
}

/// Returns the position after an element's start tag, and true if it is an empty-element tag, as in
/// `<a/>`.
fn start_tag(node: Node<'_, '_>) -> (usize, bool) {
    let text = node.document().input_text();
    let start = node.range().start;
    let mut quote = None;
    for (offset, byte) in text.as_bytes()[start..node.range().end].iter().enumerate() {
        match (quote, byte) {
            (None, b'\'' | b'"') => quote = Some(*byte),
            (Some(open), _) if open == *byte => quote = None,
            (None, b'>') => {
                let end = start + offset + 1;
                return (end, end == node.range().end && text[..end].ends_with("/>"));
            }
            _ => {}
        }
    }
    unreachable!("the parser accepted a start tag without an end")
}

/// Returns the range between an element's start tag and end tag, or None for an empty-element tag.
pub fn contents_range(node: Node<'_, '_>) -> Option<Range<usize>> {
    let (start, empty) = start_tag(node);
    let end = node.document().input_text()[..node.range().end].rfind("</")?;
    (!empty).then_some(start..end)
}

/// Returns the level of an element in the document: 0 for the root.
fn depth(node: Node<'_, '_>) -> usize {
    node.ancestors().skip(1).filter(Node::is_element).count()
}

/// Returns the number of blanks by which a child of `parent` is indented.
pub fn indent_within(parent: Node<'_, '_>) -> usize {
    (depth(parent) + 1) * INDENT
}

/// Inserts `elements` into `parent`, after the child `after`. If `after` is None, they become the
/// first children. If `parent` is an empty-element tag, it becomes a start tag and an end tag.
pub fn insert(
    parent: Node<'_, '_>,
    after: Option<Node<'_, '_>>,
    elements: &[String],
) -> Vec<Splice> {
    let (start, empty) = start_tag(parent);
    let lines: String = elements
        .iter()
        .map(|element| format!("\n{:indent$}{element}", "", indent = indent_within(parent)))
        .collect();
    if !empty {
        let at = after.map_or(start, |node| node.range().end);
        return vec![Splice(at..at, lines)];
    }
    let text = parent.document().input_text();
    let name = text[parent.range().start + 1..]
        .split(|c: char| c.is_whitespace() || "/>".contains(c))
        .next()
        .unwrap_or("");
    let end = format!(
        "{lines}\n{:indent$}</{name}>",
        "",
        indent = depth(parent) * INDENT
    );
    let slash = start - "/>".len();
    vec![
        Splice(slash..slash + 1, String::new()),
        Splice(start..start, end),
    ]
}

/// Removes the element `node`, with the line break and the blanks before it.
pub fn remove(node: Node<'_, '_>) -> Splice {
    let before = &node.document().input_text()[..node.range().start];
    let line = before.trim_end_matches([' ', '\t']);
    let line = line.strip_suffix('\n').unwrap_or(line);
    Splice(line.len()..node.range().end, String::new())
}

/// Adds an attribute to the element `node`, before its other attributes.
pub fn add_attribute(node: Node<'_, '_>, name: &str, value: &str) -> Splice {
    let start = node.range().start;
    let text = &node.document().input_text()[start..];
    let end = |c: char| c.is_whitespace() || c == '/' || c == '>';
    let at = start + text.find(end).unwrap_or(text.len());
    Splice(at..at, format!(" {name}='{}'", escape(value)))
}

/// Removes an attribute, with the blank before it.
pub fn remove_attribute(text: &str, attribute: &Attribute<'_, '_>) -> Splice {
    let range = attribute.range();
    let before = &text[..range.start];
    let blank = before.chars().next_back().filter(|c| c.is_whitespace());
    Splice(
        range.start - blank.map_or(0, char::len_utf8)..range.end,
        String::new(),
    )
}

/// Returns true if the element `node` contains nothing or only white space.
pub fn is_blank(node: Node<'_, '_>) -> bool {
    node.children()
        .all(|child| child.is_text() && child.text().unwrap_or("").trim().is_empty())
}

/// Returns the children of `parent` that are elements named `name`. A plain name means an element
/// of libvirt. `qemu:NAME` means an element of libvirt's QEMU namespace, whatever prefix the text
/// uses.
pub fn children<'a, 'input: 'a>(
    parent: Node<'a, 'input>,
    name: &'a str,
) -> impl Iterator<Item = Node<'a, 'input>> {
    let (namespace, name) = match name.strip_prefix("qemu:") {
        Some(name) => (Some(QEMU_NAMESPACE), name),
        None => (None, name),
    };
    parent.children().filter(move |child| {
        let tag = child.tag_name();
        child.is_element() && tag.name() == name && tag.namespace() == namespace
    })
}

/// Returns the first child of `parent` that is an element named `name`; see [`children`] for names.
pub fn child<'a, 'input: 'a>(parent: Node<'a, 'input>, name: &'a str) -> Option<Node<'a, 'input>> {
    children(parent, name).next()
}

/// Returns the element at a path of element names below the root, such as `devices/emulator`.
pub fn find<'a, 'input: 'a>(root: Node<'a, 'input>, path: &'a str) -> Option<Node<'a, 'input>> {
    path.split('/').try_fold(root, child)
}

/// Returns the child of `<metadata>` that belongs to a namespace. libvirt keeps at most one child
/// for each namespace.
pub fn metadata<'a, 'input: 'a>(
    root: Node<'a, 'input>,
    namespace: &'a str,
) -> Option<Node<'a, 'input>> {
    child(root, "metadata")?
        .children()
        .find(|node| node.is_element() && node.tag_name().namespace() == Some(namespace))
}
