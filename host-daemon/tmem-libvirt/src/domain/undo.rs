// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Record of the changes that attach made to a domain's XML. It is in the domain's metadata, and
//! detach reverts only the recorded changes.
//!
//! detach keeps changes that a user or a program made after attach. It does not remove an element
//! that attach added if the element has contents by now. It does not replace or remove a value that
//! attach set if the value was changed later.

use super::edit::{self, Splice, apply, escape};
use super::error::Error;
use super::names::UNDO_NAMESPACE;
use roxmltree::{Document, Node};
use std::ops::Range;

/// Namespace prefix of the XML elements that record the changes of attach.
const PREFIX: &str = "tmem-undo";

/// One recorded change of attach. Its path names an element below the root, see [`edit::find`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// attach inserted the element at this path.
    Inserted(String),
    /// attach replaced the value of the attribute, or the element's text if `attribute` is None.
    /// `old` is the text before the change, with its XML entities.
    Replaced {
        path: String,
        attribute: Option<String>,
        old: String,
        new: String,
    },
    /// attach added the attribute to the element at this path, which did not have it.
    Added {
        path: String,
        attribute: String,
        value: String,
    },
}

/// Returns the record of changes as an XML element, indented by `indent` blanks.
pub fn write(changes: &[Change], indent: usize) -> String {
    let mut text = format!("<{PREFIX}:undo xmlns:{PREFIX}=\"{UNDO_NAMESPACE}\">");
    for change in changes {
        text += &format!("\n{:indent$}  ", "");
        text += &match change {
            Change::Inserted(path) => format!("<{PREFIX}:made path=\"{path}\"/>"),
            Change::Replaced {
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
            Change::Added {
                path,
                attribute,
                value,
            } => {
                let value = escape(value);
                format!(
                    "<{PREFIX}:added path=\"{path}\" attribute=\"{attribute}\" value=\"{value}\"/>"
                )
            }
        };
    }
    text + &format!("\n{:indent$}</{PREFIX}:undo>", "")
}

/// Reads the changes from the record in a domain's metadata. Returns no changes if `record` is
/// None.
pub fn read(record: Option<Node<'_, '_>>) -> Result<Vec<Change>, Error> {
    let elements = record.into_iter().flat_map(|record| record.children());
    elements
        .filter(Node::is_element)
        .map(|element| {
            let path = element.attribute("path").unwrap_or("").to_string();
            match element.tag_name().name() {
                "made" => Ok(Change::Inserted(path)),
                "was" => Ok(Change::Replaced {
                    path,
                    attribute: element.attribute("attribute").map(Into::into),
                    old: element.text().unwrap_or("").into(),
                    new: element.attribute("new").unwrap_or("").into(),
                }),
                "added" => Ok(Change::Added {
                    path,
                    attribute: element.attribute("attribute").unwrap_or("").into(),
                    value: element.attribute("value").unwrap_or("").into(),
                }),
                name => Err(Error(format!(
                    "the record of attach's changes in the domain's metadata contains <{name}>, which this \
                     tmemctl does not know: use the version of tmemctl that attached the device"
                ))),
            }
        })
        .collect()
}

/// Reverts one change of attach, unless a user or a program has changed that part of the XML later.
pub fn revert(text: &str, change: &Change) -> Result<String, Error> {
    let document = Document::parse(text)?;
    let find = |path| edit::find(document.root_element(), path);
    let splices = match change {
        Change::Inserted(path) => match find(path) {
            Some(node) if edit::is_blank(node) => vec![edit::remove(node)],
            _ => vec![],
        },
        Change::Replaced {
            path,
            attribute,
            old,
            new,
        } => match find(path).and_then(|node| value(node, attribute.as_deref())) {
            Some((place, now)) if now == *new => vec![Splice(place, old.clone())],
            _ => vec![],
        },
        Change::Added {
            path,
            attribute,
            value,
        } => match find(path).and_then(|node| node.attribute_node(attribute.as_str())) {
            Some(present) if present.value() == value => {
                vec![edit::remove_attribute(text, &present)]
            }
            _ => vec![],
        },
    };
    Ok(apply(text, splices))
}

/// Returns the position and the value of the attribute, or of the element's text if `attribute` is
/// None.
pub fn value(node: Node<'_, '_>, attribute: Option<&str>) -> Option<(Range<usize>, String)> {
    let Some(name) = attribute else {
        let place = edit::contents_range(node)?;
        return Some((place, node.text().unwrap_or("").trim().into()));
    };
    let attribute = node.attribute_node(name)?;
    Some((attribute.range_value(), attribute.value().into()))
}
