// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Record in a domain's metadata of the changes that attach made, so that detach reverts only these
//! changes.
//!
//! Changes that a user or a program made after attach stay. detach does not remove an element that
//! attach added if the element has contents by now. It does not replace a value that attach set if
//! the value was changed later.

use crate::edit::{self, Splice, apply, escape};
use crate::{Error, UNDO_NAMESPACE};
use roxmltree::{Document, Node};
use std::ops::Range;

/// Namespace prefix of the record's elements.
const PREFIX: &str = "tmem-undo";

/// One recorded change. Paths start at the root, see [`edit::find`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// An element was inserted.
    Made(String),
    /// The value of an attribute was replaced, or the text of the element if `attribute` is None.
    /// `old` is the original text, with its entities.
    Was {
        path: String,
        attribute: Option<String>,
        old: String,
        new: String,
    },
}

/// Returns the record as an element, indented by `indent` blanks.
pub fn write(changes: &[Change], indent: usize) -> String {
    let mut text = format!("<{PREFIX}:undo xmlns:{PREFIX}=\"{UNDO_NAMESPACE}\">");
    for change in changes {
        text += &format!("\n{:indent$}  ", "");
        text += &match change {
            Change::Made(path) => format!("<{PREFIX}:made path=\"{path}\"/>"),
            Change::Was {
                path,
                attribute,
                old,
                new,
            } => {
                let attribute = attribute.as_deref();
                let attribute = attribute.map_or(String::new(), |a| format!(" attribute=\"{a}\""));
                let (old, new) = (escape(old), escape(new));
                format!(
                    "<{PREFIX}:was path=\"{path}\"{attribute} new=\"{new}\">{old}</{PREFIX}:was>"
                )
            }
        };
    }
    text + &format!("\n{:indent$}</{PREFIX}:undo>", "")
}

/// Reads the changes of a record. Without a record, returns no changes.
pub fn read(record: Option<Node<'_, '_>>) -> Result<Vec<Change>, Error> {
    let elements = record.into_iter().flat_map(|record| record.children());
    elements
        .filter(Node::is_element)
        .map(|element| {
            let path = element.attribute("path").unwrap_or("").to_string();
            match element.tag_name().name() {
                "made" => Ok(Change::Made(path)),
                "was" => Ok(Change::Was {
                    path,
                    attribute: element.attribute("attribute").map(Into::into),
                    old: element.text().unwrap_or("").into(),
                    new: element.attribute("new").unwrap_or("").into(),
                }),
                name => Err(Error(format!(
                    "the record of attach's changes in the domain's metadata contains <{name}>, which this \
                     tmemctl does not know: use the version of tmemctl that attached the device"
                ))),
            }
        })
        .collect()
}

/// Reverts a change of attach, unless the changed part of the text was changed again later.
pub fn revert(text: &str, change: &Change) -> Result<String, Error> {
    let document = Document::parse(text)?;
    let find = |path| edit::find(document.root_element(), path);
    let splices = match change {
        Change::Made(path) => match find(path) {
            Some(node) if edit::is_blank(node) => vec![edit::remove(node)],
            _ => vec![],
        },
        Change::Was {
            path,
            attribute,
            old,
            new,
        } => match find(path).and_then(|node| value(node, attribute.as_deref())) {
            Some((place, now)) if now == *new => vec![Splice(place, old.clone())],
            _ => vec![],
        },
    };
    Ok(apply(text, splices))
}

/// Returns the position and the value of an attribute, or of the element's text if `attribute` is
/// None.
pub fn value(node: Node<'_, '_>, attribute: Option<&str>) -> Option<(Range<usize>, String)> {
    let Some(name) = attribute else {
        let place = edit::inside(node)?;
        return Some((place, node.text().unwrap_or("").trim().into()));
    };
    let attribute = node.attribute_node(name)?;
    Some((attribute.range_value(), attribute.value().into()))
}
