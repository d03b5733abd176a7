// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reads what the XML of a running domain requests of the daemon.

use tmem_control::VmSpec;
use tmem_libvirt::domain::Domain;
use tmem_libvirt::{Owner, vm_spec};

/// Service that a domain's metadata requests of the daemon, see [`read`].
#[derive(Clone, Debug, PartialEq)]
pub enum Request {
    /// The daemon is to serve the VM with these settings, including the quota.
    Settings(VmSpec),
    /// The daemon is to serve the VM and keep its present quota, because the domain's metadata has
    /// no quota. If the daemon does not have the VM, it adds the VM with this description.
    KeepQuota(VmSpec),
    /// The request is not valid; the text is a sentence with the reason. The VM's settings stay
    /// unchanged.
    Invalid(String),
}

/// Reads what a domain requests of the daemon; None if the domain has no virtio-tmem device.
pub fn read(uuid: &str, xml: &str, owner: Owner) -> Option<Request> {
    let domain = match Domain::parse(xml) {
        Ok(domain) => domain,
        Err(error) => {
            // libvirt wrote this XML, so an error is no mistake of the operator. It is logged, and
            // not reported as a problem of the VM.
            tracing::error!(uuid, reason = %error, "domain {uuid}: {error}");
            return None;
        }
    };
    let device = domain.device.as_ref()?;
    let vm = |cache| vm_spec(&domain, device, cache, owner);
    let request = match (&domain.memory, &domain.cache) {
        (Err(error), _) | (Ok(()), Some(Err(error))) => Err(error.to_string()),
        (Ok(()), Some(Ok(cache))) => vm(cache).map(Request::Settings),
        (Ok(()), None) => vm(&Default::default()).map(Request::KeepQuota),
    };
    Some(request.unwrap_or_else(Request::Invalid))
}

#[cfg(test)]
mod tests {
    use super::*;

    const UUID: &str = "5ca1ab1e-0000-4000-8000-0123456789ab";

    fn xml(cache: &str, access: &str, device: &str) -> String {
        format!(
            "<domain type='kvm' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>\
             <name>web</name><uuid>{UUID}</uuid><metadata>{cache}</metadata>\
             <memoryBacking><source type='memfd'/><access mode='{access}'/></memoryBacking>\
             <qemu:commandline><qemu:arg value='-chardev'/>\
             <qemu:arg value='socket,id=virtio-tmem,path=/run/virtio-tmem/a.sock'/>\
             <qemu:arg value='-device'/><qemu:arg value='{device},chardev=virtio-tmem'/>\
             </qemu:commandline></domain>"
        )
    }

    fn cache(inside: &str) -> String {
        let namespace = tmem_libvirt::domain::CACHE_NAMESPACE;
        format!("<tmem:cache xmlns:tmem='{namespace}'>{inside}</tmem:cache>")
    }

    #[test]
    fn cache_settings_are_read_from_the_domain_xml() {
        let owner = Owner(Some(107));
        let device = tmem_libvirt::domain::DEVICE;
        let read = |cache: &str, access, device| read(UUID, &xml(cache, access, device), owner);
        let limit = cache("<tmem:limit unit='MiB'>5</tmem:limit>");
        let Some(Request::Settings(vm)) = read(&limit, "shared", device) else {
            panic!("a valid domain is refused");
        };
        assert_eq!(vm.quota.limit_bytes, Some(5 << 20));
        assert_eq!((&*vm.name, &*vm.uuid, vm.owner), ("web", UUID, Some(107)));
        let served = read("", "shared", device);
        assert!(
            matches!(served, Some(Request::KeepQuota(_))),
            "the domain is not served: {served:?}"
        );
        assert_eq!(read(&limit, "shared", "virtio-rng-pci"), None);
        let wrong = cache("<tmem:limit unit='XiB'>5</tmem:limit>");
        for (cache, access, part) in [(&wrong, "shared", "XiB"), (&limit, "private", "not shared")]
        {
            let Some(Request::Invalid(what)) = read(cache, access, device) else {
                panic!("a domain with the fault {part:?} was accepted");
            };
            assert!(
                what.contains(part),
                "the reason of the refusal does not contain {part:?}: {what}"
            );
        }
    }
}
