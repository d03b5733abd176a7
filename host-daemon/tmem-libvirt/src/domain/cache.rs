// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The XML element with a VM's quota in the metadata of a libvirt domain. If the element is
//! invalid, parsing returns the reason.

use super::edit::escape;
use super::error::Error;
use super::names::{CACHE_NAMESPACE, CACHE_PREFIX};
use super::size::{scale, write_size};
use roxmltree::Node;

/// Largest weight that the daemon accepts.
pub const WEIGHT_MAX: u32 = 10_000;
/// Longest name of a trust domain that the daemon accepts, in bytes.
const NAME_BYTES_MAX: usize = 64;

/// Quota and other cache settings of a domain. If a setting is None, the daemon uses its default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cache {
    /// Limit: largest number of bytes that the VM may be charged in the pool.
    pub limit: Option<u64>,
    /// Reserve: bytes of the pool to which the VM is entitled before all VMs share the other bytes
    /// by weight.
    pub reserve: Option<u64>,
    /// Weight: the VM's share of the pool memory that no VM has reserved, relative to the weights
    /// of the other VMs.
    pub weight: Option<u32>,
    /// Name of the trust domain; equal pages of its VMs are stored once.
    pub trust_domain: Option<String>,
    /// True if libvirt must not start the VM when it cannot have its cache.
    pub required: bool,
}

impl Cache {
    /// Checks that the settings fit each other and do not exceed the daemon's limits.
    pub fn check(&self) -> Result<(), Error> {
        let fault = |what: String| Err(Error(what));
        if let (Some(limit), Some(reserve)) = (self.limit, self.reserve)
            && limit < reserve
        {
            let (limit, limit_unit) = write_size(limit);
            let (reserve, reserve_unit) = write_size(reserve);
            return fault(format!(
                "a limit of {limit} {limit_unit} is below the reserve of {reserve} {reserve_unit}, \
                 so the VM could not use all of its reserve: raise the limit or lower the reserve"
            ));
        }
        if self.weight.is_some_and(|weight| weight > WEIGHT_MAX) {
            return fault(format!(
                "a weight of {} is too large: write a number from 0 to {WEIGHT_MAX}",
                self.weight.unwrap_or(0)
            ));
        }
        let is_allowed = |c: char| c.is_ascii_alphanumeric() || "-_.:@+".contains(c);
        match &self.trust_domain {
            Some(name)
                if name.is_empty()
                    || name.len() > NAME_BYTES_MAX
                    || !name.chars().all(is_allowed) =>
            {
                fault(format!(
                    "{name:?} cannot be a trust domain: a name has 1 to {NAME_BYTES_MAX} letters, \
                     digits or any of - _ . : @ +"
                ))
            }
            _ => Ok(()),
        }
    }

    /// Parses the XML element with a VM's quota. The element may lack its namespace, because
    /// libvirt returns metadata without it.
    pub fn parse(text: &str) -> Result<Cache, Error> {
        Cache::from_element(roxmltree::Document::parse(text)?.root_element())
    }

    pub(crate) fn from_element(element: Node<'_, '_>) -> Result<Cache, Error> {
        let fault = |what: String| Error(format!("the domain's <cache> metadata: {what}"));
        let namespace = element.tag_name().namespace();
        if element.tag_name().name() != "cache"
            || namespace.is_some_and(|name| name != CACHE_NAMESPACE)
        {
            return Err(fault(format!(
                "found the element <{}> instead of <{CACHE_PREFIX}:cache>",
                element.tag_name().name()
            )));
        }
        let mut cache = Cache::default();
        for attribute in element.attributes() {
            cache.required = match (attribute.name(), attribute.value()) {
                ("required", "yes") => true,
                ("required", "no") => false,
                (name, value) => {
                    return Err(fault(format!(
                        "{name}={value:?} is invalid: write required=\"yes\" or \"no\""
                    )));
                }
            };
        }
        let mut seen: Vec<&str> = Vec::new();
        for child in element.children() {
            if !child.is_element() {
                let text = child.text().unwrap_or("").trim();
                if child.is_text() && !text.is_empty() {
                    return Err(fault(format!(
                        "<cache> has the text {text:?} outside of its child elements: remove the text"
                    )));
                }
                continue;
            }
            let name = child.tag_name().name();
            let text = child.text().unwrap_or("").trim();
            let within = |what: String| fault(format!("<{name}>: {what}"));
            if seen.contains(&name) {
                return Err(within("the element is given twice".into()));
            }
            seen.push(name);
            if child.tag_name().namespace() != namespace || child.children().any(|c| c.is_element())
            {
                return Err(within(
                    "the element is invalid: write an element of the same namespace with text only"
                        .into(),
                ));
            }
            let sized = matches!(name, "limit" | "reserve");
            if let Some(other) = child
                .attributes()
                .find(|attribute| !sized || attribute.name() != "unit")
            {
                return Err(within(format!(
                    "the element does not support the attribute {}",
                    other.name()
                )));
            }
            let bytes = || scale(text, child.attribute("unit").unwrap_or("KiB")).map_err(within);
            match name {
                "limit" => cache.limit = Some(bytes()?),
                "reserve" => cache.reserve = Some(bytes()?),
                "weight" => {
                    let weight = text.parse().ok().filter(|weight| *weight <= WEIGHT_MAX);
                    cache.weight = Some(weight.ok_or_else(|| {
                        within(format!(
                            "{text:?} is not a whole number from 0 to {WEIGHT_MAX}"
                        ))
                    })?);
                }
                "trust_domain" => cache.trust_domain = Some(text.into()),
                _ => {
                    return Err(within(
                        "the element is unknown: write limit, reserve, weight or trust_domain"
                            .into(),
                    ));
                }
            }
        }
        cache.check().map_err(|error| fault(error.0))?;
        Ok(cache)
    }

    /// Returns the XML element for `virsh metadata --set`. It has no namespace, because virsh takes
    /// the namespace as a separate argument.
    pub fn to_metadata(&self) -> String {
        self.write("", "", 0)
    }

    /// Returns the XML element as a part of a domain's XML, indented by `indent` blanks.
    pub(crate) fn to_element(&self, indent: usize) -> String {
        let namespace = format!(" xmlns:{CACHE_PREFIX}=\"{CACHE_NAMESPACE}\"");
        self.write(&format!("{CACHE_PREFIX}:"), &namespace, indent)
    }

    fn write(&self, prefix: &str, namespace: &str, indent: usize) -> String {
        let required = if self.required { "yes" } else { "no" };
        let head = format!("<{prefix}cache{namespace} required=\"{required}\"");
        let size = |name: &str, bytes: Option<u64>| {
            let (number, unit) = write_size(bytes?);
            Some(format!(
                "<{prefix}{name} unit=\"{unit}\">{number}</{prefix}{name}>"
            ))
        };
        let children = [
            size("limit", self.limit),
            size("reserve", self.reserve),
            self.weight
                .map(|weight| format!("<{prefix}weight>{weight}</{prefix}weight>")),
            self.trust_domain.as_deref().map(|name| {
                format!(
                    "<{prefix}trust_domain>{}</{prefix}trust_domain>",
                    escape(name)
                )
            }),
        ];
        let children: String = children
            .into_iter()
            .flatten()
            .map(|child| format!("\n{:indent$}  {child}", ""))
            .collect();
        if children.is_empty() {
            return format!("{head}/>");
        }
        format!("{head}>{children}\n{:indent$}</{prefix}cache>", "")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_cache_metadata_parses_to_the_same_value() {
        let caches = [
            Cache::default(),
            Cache {
                limit: Some(2 << 30),
                reserve: Some(4097),
                weight: Some(0),
                trust_domain: Some("web.1".into()),
                required: true,
            },
        ];
        for cache in caches {
            assert_eq!(Cache::parse(&cache.to_metadata()), Ok(cache.clone()));
            assert_eq!(Cache::parse(&cache.to_element(4)), Ok(cache));
        }
    }

    #[test]
    fn cache_sizes_without_a_unit_are_kib() {
        let cache = Cache::parse("<cache><limit>2048</limit></cache>")
            .expect("a valid <cache> element was refused");
        assert_eq!(cache.limit, Some(2 << 20));
        let cache = Cache::parse("<cache> <limit unit='G'> 1 </limit>\n</cache>")
            .expect("a valid <cache> element was refused");
        assert_eq!(cache.limit, Some(1 << 30));
    }

    #[test]
    fn invalid_cache_metadata_is_refused_with_a_reason() {
        for (text, parts) in [
            (
                "<cache><limit>1</limit><reserve>2</reserve></cache>",
                &["limit of 1 KiB", "reserve of 2 KiB"][..],
            ),
            (
                "<cache><limit unit='XiB'>1</limit></cache>",
                &["<limit>", "XiB"],
            ),
            ("<cache><limit>1.5</limit></cache>", &["<limit>", "1.5"]),
            ("<cache><limit>-1</limit></cache>", &["<limit>", "-1"]),
            ("<cache><limit/></cache>", &["<limit>", "whole number"]),
            (
                "<cache><weight>10001</weight></cache>",
                &["<weight>", "10001", "10000"],
            ),
            (
                "<cache><weight unit='KiB'>1</weight></cache>",
                &["<weight>", "unit"],
            ),
            ("<cache><size>1</size></cache>", &["<size>", "trust_domain"]),
            (
                "<cache><limit>1</limit><limit>1</limit></cache>",
                &["<limit>", "twice"],
            ),
            ("<cache required='perhaps'/>", &["required", "perhaps"]),
            (
                "<cache><trust_domain>a b</trust_domain></cache>",
                &["\"a b\""],
            ),
            ("<cache><trust_domain/></cache>", &["\"\""]),
            ("<cache>1GiB</cache>", &["1GiB"]),
            ("<quota/>", &["<quota>"]),
            ("<cache xmlns='urn:other'/>", &["found the element <cache>"]),
            ("<cache", &["not the XML"]),
        ] {
            let Err(error) = Cache::parse(text) else {
                panic!("the invalid element {text:?} was accepted");
            };
            let error = error.0;
            for part in parts {
                assert!(
                    error.contains(part),
                    "the error about {text} does not contain {part:?}: {error}"
                );
            }
        }
    }
}
