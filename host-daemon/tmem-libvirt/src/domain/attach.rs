// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Adds the virtio-tmem device to the XML of a libvirt domain (attach), and removes it (detach).
//!
//! attach works in steps. Each step parses the text that the previous step left, and changes only
//! what differs from the goal. A second attach therefore changes nothing, even if libvirt has
//! rewritten the XML after the first one.

use super::cache::Cache;
use super::edit::{self, Splice, apply, child, children, escape, find, indent_within, metadata};
use super::error::Error;
use super::names::{CACHE_NAMESPACE, DEVICE, QEMU_NAMESPACE, SOCKET_DIRECTORY, UNDO_NAMESPACE};
use super::pci::free_address;
use super::read::{BALLOON, REPORTING, check_reporting, check_supported};
use super::read::{
    CHARDEV_ID, Domain, RETAIN, SWAP, argument_nodes, attached_arguments, property, qemu_arguments,
};
use super::undo::{self, Change};
use roxmltree::{Document, Node};

/// Time in ms that QEMU waits between two attempts to connect to the daemon. It is short enough
/// that a VM has its cache again soon after a restart of the daemon. It is long enough that many
/// VMs without a daemon cost the host little time.
const RECONNECT_MS: u32 = 1000;

/// Options of [`attach`].
#[derive(Clone, Debug)]
pub struct Options {
    /// Quota that attach writes into the domain's metadata.
    pub cache: Cache,
    /// Directory of the socket at which the daemon serves the VM.
    pub socket_directory: String,
    /// Path of a QEMU that has the device. None keeps the emulator that the domain's XML names.
    pub emulator: Option<String>,
    /// Value of the device's property `retain`. None leaves the property out, because an older QEMU
    /// does not start with a property that it does not know.
    pub retain: Option<bool>,
    /// Whether the device gets the property `swap=on`. The property is left out otherwise.
    pub swap: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            cache: Cache::default(),
            socket_directory: SOCKET_DIRECTORY.into(),
            emulator: None,
            retain: None,
            swap: false,
        }
    }
}

/// Adds the virtio-tmem device to a domain's XML, and returns the new XML.
///
/// # Errors
/// Returns the reason if the XML or the quota is invalid, or if the domain cannot have the device.
pub fn attach(text: &str, options: &Options) -> Result<String, Error> {
    let domain = Domain::parse(text)?;
    options.cache.check()?;
    if domain.device.as_ref().is_some_and(|device| !device.ours) {
        return Err(Error(format!(
            "domain {} has a {DEVICE} that tmemctl did not attach: remove it from <qemu:commandline> first",
            domain.name
        )));
    }
    let mut edit = Edit::new(text)?;
    edit.set_memory()?;
    edit.set_balloon()?;
    if let Some(emulator) = &options.emulator {
        edit.set_emulator(emulator)?;
    }
    let socket = format!("{}/{}.sock", options.socket_directory, domain.uuid);
    edit.set_device(&socket, options)?;
    edit.write_metadata(&options.cache)?;
    Ok(edit.text)
}

/// Returns the domain's XML with `socket` as the path to which the virtio-tmem device connects. All
/// other text is unchanged.
pub fn move_socket(text: &str, socket: &str) -> Result<String, Error> {
    let document = Document::parse(text)?;
    let root = document.root_element();
    let old = Domain::parse(text)?.device.map(|device| device.socket);
    let old = old.ok_or_else(|| Error(format!("the domain has no {DEVICE}")))?;
    let path = |socket: &str| format!("path={}", socket.replace(',', ",,"));
    let splices = argument_nodes(root).into_iter().filter_map(|node| {
        let place = node.attribute_node("value")?.range_value();
        let value = node.attribute("value")?;
        (property(value, "path").as_ref() == Some(&old))
            .then(|| Splice(place, escape(&value.replace(&path(&old), &path(socket)))))
    });
    Ok(apply(text, splices.collect()))
}

/// Returns the domain's XML without the virtio-tmem device and without the changes that attach
/// recorded. Parts that a user or a program has changed since then stay as they are. If attach
/// added children to an empty-element tag, a start tag and an end tag remain.
pub fn detach(text: &str) -> Result<String, Error> {
    Domain::parse(text)?;
    let mut text = text.to_string();
    let document = Document::parse(&text)?;
    let root = document.root_element();
    let changes = undo::read(metadata(root, UNDO_NAMESPACE))?;
    let mut splices: Vec<Splice> = [CACHE_NAMESPACE, UNDO_NAMESPACE]
        .into_iter()
        .filter_map(|namespace| metadata(root, namespace))
        .map(edit::remove)
        .collect();
    if let Some(places) = attached_arguments(&qemu_arguments(root)) {
        let nodes = argument_nodes(root);
        let values = places.into_iter().flat_map(|at| [nodes[at], nodes[at + 1]]);
        splices.extend(values.map(edit::remove));
    }
    text = apply(&text, splices);
    for change in changes.iter().rev() {
        text = undo::revert(&text, change)?;
    }
    Ok(text)
}

/// A domain's XML while attach changes it. The record in `changes` has the changes of this call of
/// attach and of earlier calls.
struct Edit {
    text: String,
    changes: Vec<Change>,
}

impl Edit {
    fn new(text: &str) -> Result<Edit, Error> {
        let document = Document::parse(text)?;
        check_supported(document.root_element())?;
        let changes = undo::read(metadata(document.root_element(), UNDO_NAMESPACE))?;
        Ok(Edit {
            text: text.into(),
            changes,
        })
    }

    /// Inserts the XML `element` into the element at the path `parent`, or into the root if
    /// `parent` is empty. The new element follows the last child whose name is in `after`, or
    /// becomes the first child if there is none. If `after` is empty, it becomes the last child.
    fn insert(&mut self, parent: &str, after: &[&str], element: &str) -> Result<(), Error> {
        let document = Document::parse(&self.text)?;
        let root = document.root_element();
        let node = match parent {
            "" => Some(root),
            path => find(root, path),
        };
        let node = node.ok_or_else(|| Error(format!("the domain has no <{parent}>")))?;
        let previous = match after {
            [] => node.last_element_child(),
            names => node
                .children()
                .rfind(|c| names.iter().any(|n| c.has_tag_name(*n))),
        };
        self.text = apply(&self.text, edit::insert(node, previous, &[element.into()]));
        Ok(())
    }

    /// Inserts the XML `element` and records the change, unless the domain already has an element
    /// at `path`.
    fn ensure(&mut self, path: &str, after: &[&str], element: &str) -> Result<(), Error> {
        if find(Document::parse(&self.text)?.root_element(), path).is_some() {
            return Ok(());
        }
        let parent = path.rsplit_once('/').map_or("", |(parent, _)| parent);
        self.insert(parent, after, element)?;
        self.changes.push(Change::Inserted(path.into()));
        Ok(())
    }

    /// Sets the value of an existing attribute, or the element's text if `attribute` is None.
    fn set(&mut self, path: &str, attribute: Option<&str>, new: &str) -> Result<(), Error> {
        let document = Document::parse(&self.text)?;
        let node = find(document.root_element(), path);
        let (place, value) = node
            .and_then(|n| undo::value(n, attribute))
            .ok_or_else(|| {
                Error(format!(
                    "the domain's <{path}> lacks {}",
                    attribute.map_or("a value".into(), |name| format!("the attribute {name}"))
                ))
            })?;
        if value == new {
            return Ok(());
        }
        // If attach has set this value before, the record of that change already has the value from
        // before attach. So the record stays, and only its new value is updated.
        let first = self.changes.iter_mut().find_map(|change| match change {
            Change::Replaced {
                path: at,
                attribute: name,
                new: last,
                ..
            } if at == path && name.as_deref() == attribute && *last == value => Some(last),
            _ => None,
        });
        match first {
            Some(last) => *last = new.into(),
            None => self.changes.push(Change::Replaced {
                path: path.into(),
                attribute: attribute.map(Into::into),
                old: self.text[place.clone()].into(),
                new: new.into(),
            }),
        }
        self.text = apply(&self.text, vec![Splice(place, escape(new))]);
        Ok(())
    }

    /// Changes the XML so that QEMU allocates the VM's memory in a shared memfd, which the daemon
    /// can map.
    fn set_memory(&mut self) -> Result<(), Error> {
        let sizes = ["maxMemory", "memory", "currentMemory"];
        let before = ["name", "uuid", "title", "description", "metadata"];
        let after: Vec<&str> = sizes.into_iter().chain(before).collect();
        self.ensure(
            "memoryBacking",
            &after,
            "<memoryBacking>\n  </memoryBacking>",
        )?;
        self.ensure("memoryBacking/source", &[], "<source type='memfd'/>")?;
        self.set("memoryBacking/source", Some("type"), "memfd")?;
        self.ensure("memoryBacking/access", &[], "<access mode='shared'/>")?;
        self.set("memoryBacking/access", Some("mode"), "shared")
    }

    /// Makes the guest return memory that it frees to the host (free page reporting of the balloon),
    /// unless that is impossible or switched off. Values that the domain has already stay.
    fn set_balloon(&mut self) -> Result<(), Error> {
        if check_reporting(Document::parse(&self.text)?.root_element()).is_err() {
            // The domain may have had the reporting until a user changed it.
            let is_ours =
                |change: &Change| matches!(change, Change::Added { path, .. } if path == BALLOON);
            for change in self.changes.extract_if(.., |change| is_ours(change)) {
                self.text = undo::revert(&self.text, &change)?;
            }
            return Ok(());
        }
        // autodeflate: if an operator has inflated the balloon, the guest takes memory back before it
        // runs out of memory.
        for name in ["autodeflate", REPORTING] {
            let document = Document::parse(&self.text)?;
            let balloon = find(document.root_element(), BALLOON);
            let balloon = balloon.filter(|node| !node.has_attribute(name));
            let Some(balloon) = balloon else {
                continue;
            };
            self.text = apply(&self.text, vec![edit::add_attribute(balloon, name, "on")]);
            self.changes.push(Change::Added {
                path: BALLOON.into(),
                attribute: name.into(),
                value: "on".into(),
            });
        }
        Ok(())
    }

    fn set_emulator(&mut self, path: &str) -> Result<(), Error> {
        self.ensure("devices/emulator", &[], "<emulator></emulator>")?;
        self.set("devices/emulator", None, path)
    }

    /// Writes QEMU's arguments for the virtio-tmem device. A device that exists keeps its PCI
    /// address.
    fn set_device(&mut self, socket: &str, options: &Options) -> Result<(), Error> {
        let document = Document::parse(&self.text)?;
        let root = document.root_element();
        let arguments = qemu_arguments(root);
        let places = attached_arguments(&arguments);
        let address = match places {
            None => free_address(root)?,
            Some([_, device]) => {
                let kept = |key| property(&arguments[device + 1], key);
                match (kept("bus"), kept("addr")) {
                    (Some(bus), Some(slot)) => format!("bus={bus},addr={slot}"),
                    _ => free_address(root)?,
                }
            }
        };
        let path = socket.replace(',', ",,");
        let retain = match options.retain {
            None => String::new(),
            Some(retain) => format!(",{RETAIN}={}", if retain { "on" } else { "off" }),
        };
        let swap = match options.swap {
            false => String::new(),
            true => format!(",{SWAP}=on"),
        };
        let values = [
            format!("socket,id={CHARDEV_ID},path={path},reconnect-ms={RECONNECT_MS}"),
            format!("{DEVICE},id={CHARDEV_ID}0,chardev={CHARDEV_ID},{address}{retain}{swap}"),
        ];
        if let Some(places) = places {
            let nodes = argument_nodes(root);
            let splices = places.iter().zip(&values).filter_map(|(at, value)| {
                let node = nodes[at + 1];
                let place = node.attribute_node("value")?.range_value();
                (node.attribute("value") != Some(value)).then(|| Splice(place, escape(value)))
            });
            self.text = apply(&self.text, splices.collect());
            return Ok(());
        }
        // The inserted element declares libvirt's QEMU namespace itself, so that the root's start
        // tag stays unchanged.
        let commandline =
            format!("<qemu:commandline xmlns:qemu='{QEMU_NAMESPACE}'>\n  </qemu:commandline>");
        self.ensure("qemu:commandline", &[], &commandline)?;
        let document = Document::parse(&self.text)?;
        let commandline = child(document.root_element(), "qemu:commandline")
            .ok_or_else(|| Error("the domain has no <qemu:commandline>".into()))?;
        let prefix = commandline.lookup_prefix(QEMU_NAMESPACE).unwrap_or("");
        let name = if prefix.is_empty() {
            "arg".into()
        } else {
            format!("{prefix}:arg")
        };
        let [chardev, device] = values;
        let elements = ["-chardev".into(), chardev, "-device".into(), device]
            .map(|value: String| format!("<{name} value='{}'/>", escape(&value)));
        let behind = children(commandline, "qemu:arg").last();
        self.text = apply(&self.text, edit::insert(commandline, behind, &elements));
        Ok(())
    }

    /// Writes the quota and the record of changes into the domain's metadata. It is the last step
    /// of attach, because the earlier steps add to the record.
    fn write_metadata(&mut self, cache: &Cache) -> Result<(), Error> {
        let before = ["name", "uuid", "genid", "title", "description"];
        self.ensure("metadata", &before, "<metadata>\n  </metadata>")?;
        let document = Document::parse(&self.text)?;
        let root = document.root_element();
        let node =
            child(root, "metadata").ok_or_else(|| Error("the domain has no <metadata>".into()))?;
        let indent = indent_within(node);
        let record = metadata(root, UNDO_NAMESPACE);
        let present = metadata(root, CACHE_NAMESPACE);
        let same = present.is_some_and(|node| Cache::from_element(node).as_ref() == Ok(cache));
        let mut splices = Vec::new();
        let mut inserted = Vec::new();
        let mut place = |node: Option<Node<'_, '_>>, element: String| match node {
            Some(node) => splices.push(Splice(node.range(), element)),
            None => inserted.push(element),
        };
        if !same {
            place(present, cache.to_element(indent));
        }
        if undo::read(record)? != self.changes {
            place(record, undo::write(&self.changes, indent));
        }
        if !inserted.is_empty() {
            splices.extend(edit::insert(node, node.last_element_child(), &inserted));
        }
        self.text = apply(&self.text, splices);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attach_sets_and_removes_the_properties_retain_and_swap() {
        let plain = "<domain type='kvm'><name>a</name><uuid>b</uuid>\
                     <os><type machine='q35'>hvm</type></os><devices/></domain>";
        let mut text = plain.to_string();
        let settings = [
            (None, false),
            (Some(true), true),
            (Some(false), true),
            (Some(true), false),
            (None, true),
            (None, false),
        ];
        for (retain, swap) in settings {
            let options = Options {
                retain,
                swap,
                ..Options::default()
            };
            text = attach(&text, &options).expect("a valid domain was refused");
            let device = Domain::parse(&text)
                .expect("a valid domain was refused")
                .device;
            let set = device.map(|device| (device.retain, device.swap));
            assert_eq!(set, Some((retain, swap)));
            let again = attach(&text, &options).expect("a valid domain was refused");
            assert_eq!(again, text, "a second attach changes the domain");
        }
        let without = detach(&text).expect("a valid domain was refused");
        assert!(!without.contains(DEVICE) && !without.contains(RETAIN));
    }

    #[test]
    fn moving_the_socket_changes_only_the_socket_path_of_the_device() {
        let plain = "<domain type='kvm'><name>a</name><uuid>b</uuid><!-- /run/virtio-tmem/b.sock -->\
                     <os><type machine='q35'>hvm</type></os><devices/></domain>";
        assert!(move_socket(plain, "/x").is_err());
        let before = attach(plain, &Options::default()).expect("a valid domain was refused");
        let after =
            move_socket(&before, "/run/a,b&c").expect("the domain does not have the device");
        let device = Domain::parse(&after)
            .expect("a valid domain was refused")
            .device;
        assert_eq!(device.map(|d| d.socket).as_deref(), Some("/run/a,b&c"));
        assert!(after.contains("<!-- /run/virtio-tmem/b.sock -->"));
        let back = move_socket(&after, "/run/virtio-tmem/b.sock")
            .expect("the domain does not have the device");
        assert_eq!(back, before);
    }
}
