// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Changes to a text that is XML, by the places of its nodes: what is not changed is copied.
//!
//! An element is put in behind what is there, with a line break and blanks before it, and taken out
//! with just these; so taking out what was put in gives the same bytes, whatever lies around.

use crate::QEMU_NAMESPACE;
use roxmltree::Node;
use std::ops::Range;

/// Blanks that libvirt indents a level by.
const INDENT: usize = 2;

/// A piece of the text and what takes its place.
pub struct Splice(pub Range<usize>, pub String);

/// The text with all of it done; pieces must not overlap. Of two at one place the first comes first.
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

/// Text that may stand in an element or, quoted, in an attribute.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('\'', "&apos;")
        .replace('"', "&quot;")
}

/// The place behind an element's start tag, and whether that is all there is of it.
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
    unreachable!("the parser has seen the end of the start tag")
}

/// The text between an element's tags, if it has two.
pub fn inside(node: Node<'_, '_>) -> Option<Range<usize>> {
    let (start, empty) = start_tag(node);
    let end = node.document().input_text()[..node.range().end].rfind("</")?;
    (!empty).then_some(start..end)
}

/// How deep an element lies: 0 for the root.
fn depth(node: Node<'_, '_>) -> usize {
    node.ancestors().skip(1).filter(Node::is_element).count()
}

/// Blanks before a child of the element.
pub fn indent_within(parent: Node<'_, '_>) -> usize {
    (depth(parent) + 1) * INDENT
}

/// Puts elements into one, behind `after` or, without, before everything. The second is true if the
/// parent was an empty-element tag and is opened for it.
pub fn insert(
    parent: Node<'_, '_>,
    after: Option<Node<'_, '_>>,
    elements: &[String],
) -> (Vec<Splice>, bool) {
    let (start, empty) = start_tag(parent);
    let lines: String = elements
        .iter()
        .map(|element| format!("\n{:indent$}{element}", "", indent = indent_within(parent)))
        .collect();
    if !empty {
        let at = after.map_or(start, |node| node.range().end);
        return (vec![Splice(at..at, lines)], false);
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
    let opened = vec![
        Splice(slash..slash + 1, String::new()),
        Splice(start..start, end),
    ];
    (opened, true)
}

/// Takes an element out, with the line break and the blanks before it.
pub fn remove(node: Node<'_, '_>) -> Splice {
    let before = &node.document().input_text()[..node.range().start];
    let line = before.trim_end_matches([' ', '\t']);
    let line = line.strip_suffix('\n').unwrap_or(line);
    Splice(line.len()..node.range().end, String::new())
}

/// True if there is nothing in an element but white space.
pub fn is_blank(node: Node<'_, '_>) -> bool {
    node.children()
        .all(|child| child.is_text() && child.text().unwrap_or("").trim().is_empty())
}

/// Makes an element an empty-element tag again; there must be nothing in it.
pub fn close(node: Node<'_, '_>) -> Vec<Splice> {
    let (start, empty) = start_tag(node);
    if empty {
        return Vec::new();
    }
    vec![
        Splice(start - 1..start - 1, "/".into()),
        Splice(start..node.range().end, String::new()),
    ]
}

/// Children that are elements of that name: of libvirt's own, or `qemu:NAME` of what it passes on to
/// QEMU, whatever prefix the text has for it.
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

/// The first child of that name.
pub fn child<'a, 'input: 'a>(parent: Node<'a, 'input>, name: &'a str) -> Option<Node<'a, 'input>> {
    children(parent, name).next()
}

/// The element that a path of names leads to from the root, such as `devices/emulator`.
pub fn find<'a, 'input: 'a>(root: Node<'a, 'input>, path: &'a str) -> Option<Node<'a, 'input>> {
    path.split('/').try_fold(root, child)
}

/// The metadata element of that namespace; libvirt keeps one of each.
pub fn metadata<'a, 'input: 'a>(
    root: Node<'a, 'input>,
    namespace: &'a str,
) -> Option<Node<'a, 'input>> {
    child(root, "metadata")?
        .children()
        .find(|node| node.is_element() && node.tag_name().namespace() == Some(namespace))
}
