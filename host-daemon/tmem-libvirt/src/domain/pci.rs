// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Chooses a free PCI address for the virtio-tmem device. libvirt does not know this device, and so
//! assigns it no address.
//!
//! libvirt assigns PCI slots from the lowest up, so the virtio-tmem device takes the highest free
//! one. A device that is plugged in later then conflicts with it only if no other slot is free.

use super::edit::{child, find};
use super::error::Error;
use super::read::qemu_arguments;
use roxmltree::Node;
use std::collections::HashSet;

/// Usable slots of the root bus of a machine `pc` (i440FX); the highest is preferred. The chip set
/// and usually a display occupy the slots below 3.
const SLOTS_PCI: std::ops::RangeInclusive<u8> = 3..=31;
/// Usable slots of the root bus of a machine `q35`. USB and the chip set occupy the slots above 23.
/// libvirt's root ports occupy the slots below 3.
const SLOTS_PCIE: std::ops::RangeInclusive<u8> = 3..=23;

/// Returns QEMU's name of the domain's PCI root bus, and the usable slots of that bus.
fn root_bus(root: Node<'_, '_>) -> Result<(&'static str, std::ops::RangeInclusive<u8>), Error> {
    let devices = child(root, "devices");
    let controllers = devices.into_iter().flat_map(|node| node.children());
    let model = controllers
        .filter(|node| {
            node.has_tag_name("controller")
                && node.attribute("type") == Some("pci")
                && node.attribute("index") == Some("0")
        })
        .find_map(|node| node.attribute("model"));
    let machine = find(root, "os/type").and_then(|node| node.attribute("machine"));
    match (model, machine) {
        (Some("pci-root"), _) => Ok(("pci.0", SLOTS_PCI)),
        (Some("pcie-root"), _) => Ok(("pcie.0", SLOTS_PCIE)),
        (None, Some(machine)) if machine.contains("q35") => Ok(("pcie.0", SLOTS_PCIE)),
        (None, Some(machine)) if machine == "pc" || machine.starts_with("pc-i440fx") => {
            Ok(("pci.0", SLOTS_PCI))
        }
        (None, machine) => Err(Error(format!(
            "the machine {} has an unknown PCI bus: use a pc or q35 machine",
            machine.map_or("without a type".into(), |machine| format!("{machine:?}"))
        ))),
        (Some(model), _) => Err(Error(format!(
            "the domain's first PCI controller is a {model:?}: use a pc or q35 machine"
        ))),
    }
}

/// Parses a number as libvirt writes it in XML, for example `0x1f` or `31`. Returns None if the
/// text is no such number.
fn parse_number(text: &str) -> Option<u32> {
    match text.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

/// Returns the slots of the PCI root bus that the domain's devices and QEMU arguments occupy.
fn taken_slots(root: Node<'_, '_>, bus: &str) -> HashSet<u32> {
    let devices = child(root, "devices");
    let devices = devices.into_iter().flat_map(|node| node.children());
    // Only an <address> that is a direct child of the device is a slot in the VM. An <address>
    // below <source> is an address on the host.
    let addresses = devices
        .filter(Node::is_element)
        .filter_map(|device| child(device, "address"));
    let device_slots = addresses
        .filter(|address| address.attribute("type") == Some("pci"))
        .filter(|address| address.attribute("bus").and_then(parse_number).unwrap_or(0) == 0)
        .filter_map(|address| address.attribute("slot").and_then(parse_number));
    let arguments = qemu_arguments(root);
    let argument_slots = arguments.iter().filter_map(|argument| {
        let property = |key: &str| {
            let mut pairs = argument.split(',').filter_map(|pair| pair.split_once('='));
            pairs.find(|(name, _)| *name == key).map(|(_, value)| value)
        };
        let slot = property("addr")?.split('.').next()?;
        // QEMU reads the slot in `addr=` as hexadecimal even without 0x.
        let slot = u32::from_str_radix(slot.trim_start_matches("0x"), 16).ok()?;
        property("bus").is_none_or(|on| on == bus).then_some(slot)
    });
    device_slots.chain(argument_slots).collect()
}

/// Chooses the highest free slot of the PCI root bus. Returns the bus and the slot as QEMU
/// properties, such as `bus=pci.0,addr=0x1f`.
pub fn free_address(root: Node<'_, '_>) -> Result<String, Error> {
    let (bus, slots) = root_bus(root)?;
    let taken = taken_slots(root, bus);
    let free = slots.rev().find(|slot| !taken.contains(&u32::from(*slot)));
    match free {
        Some(slot) => Ok(format!("bus={bus},addr={slot:#04x}")),
        None => Err(Error(format!(
            "all slots of the bus {bus} are taken: move a device to another bus"
        ))),
    }
}
