// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reads a domain's XML: the virtio-tmem device, the quota, and the settings on which the VM's
//! cache depends.

use super::cache::Cache;
use super::edit::{child, children, find, metadata};
use super::error::Error;
use super::names::{CACHE_NAMESPACE, DEVICE};
use super::size::scale;
use roxmltree::{Document, Node};

/// QEMU id of the chardev that connects to the daemon's socket. A device whose chardev has this id
/// was added by attach.
pub(crate) const CHARDEV_ID: &str = "virtio-tmem";

/// Name of the QEMU device property that turns retained pages on (pages that a get leaves in the
/// pool).
pub(crate) const RETAIN: &str = "retain";

/// Name of the QEMU device property that has the guest's driver cache swap areas.
pub(crate) const SWAP: &str = "swap";

/// Path of the balloon in a domain's XML.
pub(crate) const BALLOON: &str = "devices/memballoon";

/// Attribute of the balloon that turns free page reporting on: the guest returns memory that it
/// frees to the host.
pub(crate) const REPORTING: &str = "freePageReporting";

/// The settings in a domain's XML that virtio-tmem uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Domain {
    /// Name of the domain.
    pub name: String,
    /// UUID of the domain, in lower case.
    pub uuid: String,
    /// Path of the emulator, if the XML names one.
    pub emulator: Option<String>,
    /// The virtio-tmem device, if the domain has one.
    pub device: Option<Device>,
    /// The quota in the domain's metadata. It is None if the metadata contains no quota, and an
    /// error if the quota is invalid.
    pub cache: Option<Result<Cache, Error>>,
    /// The user that runs the domain's QEMU, if the XML names one: a user name, or a numeric user
    /// id after a plus sign.
    pub user: Option<String>,
    /// True if the VM has ACPI.
    pub acpi: bool,
    /// Ok if the daemon can map the VM's memory. Otherwise the error gives the reason.
    pub memory: Result<(), Error>,
    /// Whether memory that the guest frees returns to the host (free page reporting). An error gives
    /// the reason why that is impossible or switched off.
    pub reporting: Result<bool, Error>,
    /// True if the domain's balloon has free page reporting, even if that returns no memory.
    pub requests_reporting: bool,
    /// Bytes that the guest may take from the host's available memory. The value is 0 if the
    /// guest's memory consists of huge pages, because the host sets these aside in advance.
    pub host_memory_bytes: u64,
    /// Maximum size of the guest's memory in bytes, including memory that can be added while the VM
    /// runs. None if the XML does not give it.
    pub memory_max_bytes: Option<u64>,
}

/// The virtio-tmem device, as described by the QEMU arguments in the domain's XML.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Path of the daemon's socket that the device connects to.
    pub socket: String,
    /// True if attach added the device; false if a user added it by hand.
    pub ours: bool,
    /// Value of the device's property `retain`; None if the property is missing or not a boolean.
    pub retain: Option<bool>,
    /// True if the device has `swap=on`, so that the guest's swap areas are cached.
    pub swap: bool,
}

impl Domain {
    /// Parses a domain's XML.
    pub fn parse(text: &str) -> Result<Domain, Error> {
        Domain::from_document(&Document::parse(text)?)
    }

    fn from_document(document: &Document<'_>) -> Result<Domain, Error> {
        let root = document.root_element();
        if !root.has_tag_name("domain") {
            return Err(Error(format!(
                "this is not the XML of a domain: its root element is <{}>",
                root.tag_name().name()
            )));
        }
        let text = |path| find(root, path).and_then(|node| node.text()).map(str::trim);
        let must = |path| {
            text(path).filter(|text| !text.is_empty()).ok_or_else(|| {
                Error(format!(
                    "the domain has no <{path}>: pass the complete XML, as virsh dumpxml prints it"
                ))
            })
        };
        Ok(Domain {
            name: must("name")?.into(),
            uuid: must("uuid")?.to_ascii_lowercase(),
            emulator: text("devices/emulator").map(Into::into),
            device: device(root),
            cache: metadata(root, CACHE_NAMESPACE).map(Cache::from_element),
            user: user(root),
            acpi: find(root, "features/acpi").is_some(),
            memory: check_memory(root),
            reporting: check_reporting(root).map(|()| has_reporting(root)),
            requests_reporting: has_reporting(root),
            host_memory_bytes: host_memory_bytes(root),
            memory_max_bytes: size(root, "maxMemory").or_else(|| size(root, "memory")),
        })
    }
}

/// Returns the arguments that the domain's XML adds to QEMU's command line.
pub(crate) fn qemu_arguments(root: Node<'_, '_>) -> Vec<String> {
    argument_nodes(root)
        .iter()
        .map(|node| node.attribute("value").unwrap_or("").into())
        .collect()
}

/// Returns the XML elements of the arguments that the domain's XML adds to QEMU's command line.
pub(crate) fn argument_nodes<'a, 'input: 'a>(root: Node<'a, 'input>) -> Vec<Node<'a, 'input>> {
    children(root, "qemu:commandline")
        .flat_map(|commandline| children(commandline, "qemu:arg"))
        .collect()
}

/// Returns the value of the property `key` in a QEMU option such as `a=1,b=2`. A comma in a value
/// is written twice.
pub(crate) fn property(options: &str, key: &str) -> Option<String> {
    let options = options.replace(",,", "\0");
    let mut pairs = options.split(',').filter_map(|pair| pair.split_once('='));
    let (_, value) = pairs.find(|(name, _)| *name == key)?;
    Some(value.replace('\0', ","))
}

/// Returns the positions of the arguments `-chardev` and `-device` that attach added, if it added a
/// device.
pub(crate) fn attached_arguments(arguments: &[String]) -> Option<[usize; 2]> {
    let is = |at: usize, option: &str, id: &str| {
        arguments[at] == option
            && arguments
                .get(at + 1)
                .is_some_and(|value| property(value, id).as_deref() == Some(CHARDEV_ID))
    };
    let chardev = (0..arguments.len()).find(|at| is(*at, "-chardev", "id"))?;
    let device = (0..arguments.len()).find(|at| is(*at, "-device", "chardev"))?;
    Some([chardev, device])
}

fn device(root: Node<'_, '_>) -> Option<Device> {
    let arguments = qemu_arguments(root);
    let after = |option: &str, good: &dyn Fn(&str) -> bool| {
        let mut pairs = arguments.windows(2);
        pairs
            .find(|pair| pair[0] == option && good(&pair[1]))
            .map(|pair| pair[1].clone())
    };
    let device = after("-device", &|value| value.split(',').next() == Some(DEVICE))?;
    let id = property(&device, "chardev")?;
    let chardev = after("-chardev", &|value| {
        property(value, "id").as_ref() == Some(&id)
    })?;
    Some(Device {
        socket: property(&chardev, "path").unwrap_or_default(),
        ours: id == CHARDEV_ID,
        retain: property(&device, RETAIN).and_then(|value| boolean(&value)),
        swap: property(&device, SWAP).and_then(|value| boolean(&value)) == Some(true),
    })
}

/// Returns the value of a boolean QEMU property; None if QEMU would not read it as a boolean.
fn boolean(value: &str) -> Option<bool> {
    match value {
        "on" | "yes" | "true" | "y" => Some(true),
        "off" | "no" | "false" | "n" => Some(false),
        _ => None,
    }
}

/// Returns the user that runs the domain's QEMU, if the XML names one. The XML names it as
/// `user:group` in a security label of the model `dac`.
fn user(root: Node<'_, '_>) -> Option<String> {
    let labels = root.children().filter(|node| node.has_tag_name("seclabel"));
    let mut labels = labels.filter(|node| node.attribute("model") == Some("dac"));
    let label = child(labels.next()?, "label")?.text()?.trim();
    Some(label.split(':').next()?.into())
}

/// Checks that the daemon can map the VM's memory. The memory must be shared, and in a memfd: QEMU
/// seals a memfd so that no process can shrink it.
fn check_memory(root: Node<'_, '_>) -> Result<(), Error> {
    for (place, name, good, is_not) in [
        ("access", "mode", "shared", "shared"),
        ("source", "type", "memfd", "in a memfd"),
    ] {
        let backing = child(root, "memoryBacking");
        let element = backing.and_then(|backing| child(backing, place));
        let value = element.and_then(|node| node.attribute(name));
        if value != Some(good) {
            let has = match value {
                None => format!("no <{place} {name}='{good}'/>"),
                Some(value) => format!("<{place} {name}='{value}'/>"),
            };
            return Err(Error(format!(
                "the domain's memory is not {is_not}: <memoryBacking> has {has}; run tmemctl \
                 attach, which changes it"
            )));
        }
    }
    check_supported(root)
}

/// Checks that free page reporting can return memory to the host, and is not switched off. QEMU ignores reports, without a
/// message, while it has a VFIO or vhost-vdpa device. With huge pages, a page that QEMU returned may
/// be missing when the guest needs it again, and QEMU is then killed.
pub(crate) fn check_reporting(root: Node<'_, '_>) -> Result<(), Error> {
    let no = |reason: &str| {
        Err(Error(format!(
            "the guest returns no memory to the host: {reason}"
        )))
    };
    let balloon = find(root, BALLOON);
    let model = balloon.and_then(|node| node.attribute("model"));
    if !model.is_some_and(|model| model.starts_with("virtio")) {
        return no("the domain has no <memballoon model='virtio'/>");
    }
    let has = balloon.and_then(|node| node.attribute(REPORTING));
    if has.is_some_and(|has| has != "on") {
        return no("its <memballoon> has freePageReporting='off'");
    }
    if find(root, "memoryBacking/hugepages").is_some() {
        return no("its memory consists of huge pages");
    }
    let devices = child(root, "devices")
        .into_iter()
        .flat_map(|devices| devices.children());
    let is_vfio = |node: &Node<'_, '_>| match (node.tag_name().name(), node.attribute("type")) {
        ("hostdev", kind) => matches!(kind, Some("pci" | "mdev")),
        ("interface", kind) => matches!(kind, Some("hostdev" | "vdpa")),
        ("disk", kind) => kind == Some("vhostvdpa"),
        _ => false,
    };
    match devices.into_iter().any(|node| is_vfio(&node)) {
        true => no("QEMU keeps it for a VFIO or vhost-vdpa device"),
        false => Ok(()),
    }
}

/// Returns true if the domain's balloon has free page reporting.
fn has_reporting(root: Node<'_, '_>) -> bool {
    let balloon = find(root, BALLOON);
    balloon.and_then(|node| node.attribute(REPORTING)) == Some("on")
}

/// Returns the size of the domain's `currentMemory` in bytes, which the balloon lets the guest use.
/// Returns the size of its `memory` if it has no `currentMemory`, or if the guest takes memory from
/// the balloon when it needs it (`autodeflate`). Returns 0 if the memory consists of huge pages.
fn host_memory_bytes(root: Node<'_, '_>) -> u64 {
    if find(root, "memoryBacking/hugepages").is_some() {
        return 0;
    }
    let balloon = find(root, BALLOON);
    let deflates = balloon.and_then(|node| node.attribute("autodeflate")) == Some("on");
    size(root, "currentMemory")
        .filter(|_| !deflates)
        .or_else(|| size(root, "memory"))
        .unwrap_or(0)
}

/// Returns the size in bytes that the domain's element `name` gives; None without a valid size.
fn size(root: Node<'_, '_>, name: &str) -> Option<u64> {
    let node = child(root, name)?;
    let unit = node.attribute("unit").unwrap_or("KiB");
    scale(node.text()?.trim(), unit).ok()
}

/// Checks that the domain has no setting that makes the cache impossible and that attach cannot
/// change.
pub(crate) fn check_supported(root: Node<'_, '_>) -> Result<(), Error> {
    if let Some(kind) = root
        .attribute("type")
        .filter(|k| !["kvm", "qemu"].contains(k))
    {
        return Err(Error(format!(
            "the domain has the type {kind:?}: only QEMU domains (kvm, qemu) are supported"
        )));
    }
    if let Some(security) = child(root, "launchSecurity") {
        return Err(Error(format!(
            "the domain's memory is encrypted (<launchSecurity type='{}'>), so the host cannot \
             read what the guest would put",
            security.attribute("type").unwrap_or("")
        )));
    }
    let numa = find(root, "cpu/numa");
    let cells = numa.into_iter().flat_map(|numa| numa.children());
    for cell in cells.filter(|cell| cell.has_tag_name("cell")) {
        if let Some(access) = cell.attribute("memAccess").filter(|a| *a != "shared") {
            return Err(Error(format!(
                "NUMA cell {} has memAccess='{access}': set it to shared, or remove it",
                cell.attribute("id").unwrap_or("?")
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maximum_memory_includes_hot_pluggable_memory() {
        let maximum = |inside: &str| {
            let xml = format!("<domain><name>a</name><uuid>b</uuid>{inside}</domain>");
            Domain::parse(&xml)
                .expect("a valid domain was refused")
                .memory_max_bytes
        };
        let memory = "<memory unit='GiB'>2</memory><currentMemory unit='GiB'>1</currentMemory>";
        assert_eq!(maximum(memory), Some(2 << 30));
        let more = "<maxMemory slots='16' unit='GiB'>8</maxMemory>";
        assert_eq!(maximum(&format!("{more}{memory}")), Some(8 << 30));
        assert_eq!(maximum(""), None);
    }

    #[test]
    fn host_memory_of_a_domain_excludes_huge_pages() {
        let takes = |inside: &str| {
            let xml = format!("<domain><name>a</name><uuid>b</uuid>{inside}</domain>");
            Domain::parse(&xml)
                .expect("a valid domain was refused")
                .host_memory_bytes
        };
        let memory = "<memory unit='GiB'>2</memory>";
        assert_eq!(takes(memory), 2 << 30);
        assert_eq!(takes("<memory>1024</memory>"), 1 << 20);
        let current = "<currentMemory unit='MiB'>512</currentMemory>";
        assert_eq!(takes(&format!("{memory}{current}")), 512 << 20);
        let balloon = "<devices><memballoon model='virtio' autodeflate='on'/></devices>";
        assert_eq!(takes(&format!("{memory}{current}{balloon}")), 2 << 30);
        let balloon = balloon.replace("'on'", "'off'");
        assert_eq!(takes(&format!("{memory}{current}{balloon}")), 512 << 20);
        let huge = "<memoryBacking><hugepages/></memoryBacking>";
        assert_eq!(takes(&format!("{memory}{huge}")), 0);
        assert_eq!((takes(""), takes("<memory unit='x'>1</memory>")), (0, 0));
    }
}
