// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Error of reading or changing a domain's XML.

/// Reason why a domain's XML cannot be read or changed: a sentence that names the element and its
/// value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Error(pub String);

impl From<roxmltree::Error> for Error {
    fn from(error: roxmltree::Error) -> Error {
        Error(format!("this is not the XML of a domain: {error}"))
    }
}
