// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checks libvirt's domains: the virtio-tmem device, shared memory, and an emulator that has the
//! device.

use super::finding::{Check, Finding};
use crate::emulator::{self, Emulator};
use crate::exit::{Code, Failure};
use crate::libvirt::is_local;
use crate::reach::{Reach, within_timeout};
use crate::table::size;
use std::path::Path;
use tmem_control as api;
use tmem_libvirt::domain::Domain;
use virt::connect::Connect;
use virt::sys;

/// Free memory of a guest that may be on the host without a warning: memory that the guest frees and
/// uses again all the time, and blocks that are too small to be reported.
const KEPT_BYTES_MIN: i64 = 256 << 20;

/// Checks all domains of the libvirt at `uri`. `served` are the VMs that the daemon serves;
/// `retains` is true if the daemon supports retained pages. Both are None if the daemon does not
/// answer.
pub fn findings(
    reach: &Reach,
    uri: &str,
    root: &Path,
    served: Option<&[api::Vm]>,
    retains: Option<bool>,
) -> Vec<Finding> {
    let check = Check::new("libvirt", "host");
    if !root.join("etc/libvirt").exists() {
        return vec![check.good("there is no libvirt")];
    }
    let own = uri.to_string();
    let domains = within_timeout(&format!("libvirt at {uri}"), reach, move |_| read(&own));
    let domains = match domains {
        Ok(domains) => domains,
        Err(Failure(why, _)) => {
            let remedy = "systemctl start libvirtd, or name another one with --connect";
            return vec![check.warning(why, remedy)];
        }
    };
    let mut findings = vec![check.good(format!("{} domains", domains.len()))];
    let limit = reach.half_the_time();
    let host = Host {
        served,
        retains,
        ask: &|emulator| emulator::ask(emulator, limit),
    };
    let host = is_local(uri).then_some(&host);
    for seen in domains {
        findings.extend(super::installation::huge_pages(
            &seen.xml,
            seen.active,
            root,
        ));
        findings.extend(check_domain(&seen, host));
    }
    findings
}

/// A domain as libvirt describes it.
struct Seen {
    xml: String,
    /// True if the domain runs.
    active: bool,
    /// Free memory of the guest by the balloon's statistics; None if these are not collected.
    free_bytes: Option<u64>,
}

fn read(uri: &str) -> Result<Vec<Seen>, Failure> {
    virt::error::clear_error_callback();
    let domains = Connect::open_read_only(Some(uri)).and_then(|connection| {
        let domains = connection.list_all_domains(0)?;
        // A domain that was removed after libvirt listed it cannot be read, and is skipped.
        let read = |domain: &virt::domain::Domain| {
            let active = domain.is_active().ok()?;
            Some(Seen {
                xml: domain.get_xml_desc(0).ok()?,
                active,
                free_bytes: active.then(|| free_bytes(domain)).flatten(),
            })
        };
        Ok(domains.iter().filter_map(read).collect())
    });
    domains.map_err(|error| {
        let what = format!("libvirt at {uri} does not answer: {}", error.message());
        Failure(what, Code::Unreachable)
    })
}

/// Returns the free memory of a running guest, which its balloon reports if the domain has a period
/// for the balloon's statistics.
fn free_bytes(domain: &virt::domain::Domain) -> Option<u64> {
    let statistics = domain.memory_stats(0).ok()?;
    let value = |tag| Some(statistics.iter().find(|each| each.tag == tag)?.val);
    value(sys::VIR_DOMAIN_MEMORY_STAT_LAST_UPDATE).filter(|&second| second > 0)?;
    value(sys::VIR_DOMAIN_MEMORY_STAT_UNUSED)?.checked_mul(1024)
}

/// Checks that the memory that a guest has freed is not on the host any more.
///
/// QEMU and the guest keep it without a message if the guest's kernel does not support reports,
/// during a post-copy migration, or if the guest fills free pages with a pattern. A migration makes
/// all memory resident, and the guest reports a page only once.
fn check_returned(name: &str, vm: &api::Vm, free_bytes: u64) -> Option<Finding> {
    let check = Check::new("freed-memory", name);
    let (memory, resident) = (vm.memory_bytes?, vm.memory_resident_bytes?);
    let free = i64::try_from(free_bytes).ok()?.min(memory);
    let kept = (resident - (memory - free)).max(0);
    Some(if kept > (free / 2).max(KEPT_BYTES_MIN) {
        check.warning(
            format!(
                "the guest has {} of free memory, and {} of it are still on the host",
                size(free),
                size(kept)
            ),
            "shut the domain down and start it if it was migrated; otherwise see docs/libvirt.md, \
             \"Memory that the guest frees\"",
        )
    } else {
        check.good("the guest has returned the memory that it freed")
    })
}

/// Facts about this host that the checks of domains need.
struct Host<'a> {
    /// VMs that the daemon serves; None if the daemon does not answer.
    served: Option<&'a [api::Vm]>,
    /// Whether the daemon supports retained pages; None if the daemon does not answer.
    retains: Option<bool>,
    /// Function that asks an emulator whether it has the virtio-tmem device.
    ask: &'a dyn Fn(&str) -> Result<Emulator, String>,
}

/// Checks one domain. `host` is None if the domain belongs to a libvirt on another host.
fn check_domain(seen: &Seen, host: Option<&Host>) -> Vec<Finding> {
    let domain = match Domain::parse(&seen.xml) {
        Ok(domain) => domain,
        Err(error) => {
            let remedy = "virsh edit the domain: its XML cannot be read";
            return vec![Check::new("domain", "a domain").fault(error.0, remedy)];
        }
    };
    let name = domain.name.as_str();
    let attach = format!("tmemctl attach {name}");
    let Some(device) = &domain.device else {
        return match domain.cache {
            None => Vec::new(),
            Some(_) => vec![Check::new("device", name).fault(
                "the domain's XML has a quota but no device",
                &format!("{attach}, and restart the domain"),
            )],
        };
    };
    let mut findings = Vec::new();
    findings.push(match &domain.memory {
        Ok(()) => Check::new("shared-memory", name).good("the domain's memory is shared"),
        Err(error) => Check::new("shared-memory", name).fault(
            error.0.clone(),
            &format!("{attach}, and restart the domain"),
        ),
    });
    let check = Check::new("free-page-reporting", name);
    findings.push(match &domain.reporting {
        Ok(true) => check.good("the guest returns memory that it frees"),
        Ok(false) => check.warning(
            "the guest does not return memory that it frees: its balloon has no freePageReporting",
            &format!("{attach}, and restart the domain"),
        ),
        Err(error) if domain.requests_reporting => check.warning(
            error.0.clone(),
            &format!(
                "virsh edit {name}: remove freePageReporting from <memballoon>. With huge pages, \
                 QEMU is killed if the host lacks one that the guest has returned"
            ),
        ),
        // It is a property of the domain or a decision of its owner.
        Err(error) => check.good(error.0.clone()),
    });
    if let Some(Err(error)) = &domain.cache {
        let remedy = format!("tmemctl quota {name}, with valid values");
        findings.push(Check::new("quota", name).fault(error.0.clone(), &remedy));
    }
    if let (Some(emulator), Some(host)) = (&domain.emulator, host) {
        let check = Check::new("emulator", name);
        let remedy =
            format!("apt install virtio-tmem-qemu; {attach}; shut the domain down and start it");
        findings.push(match (host.ask)(emulator) {
            Ok(found) if !found.has_device => check.fault(
                format!("the domain's emulator {emulator} does not have the virtio-tmem device"),
                &remedy,
            ),
            Ok(found) if device.retain.is_some() && !found.has_retain => check.fault(
                format!(
                    "the domain's device has the property retain, which {emulator} does not have: the VM \
                     does not start"
                ),
                &format!("{attach} --retain auto --emulator {emulator}, or update QEMU"),
            ),
            Ok(found) if device.swap && !found.has_swap => check.fault(
                format!(
                    "the domain's device has the property swap, which {emulator} does not have: the VM \
                     does not start"
                ),
                &format!("{attach} --swap off --emulator {emulator}, or update QEMU"),
            ),
            Ok(_) => check.good("the domain's emulator has the device"),
            Err(why) => check.fault(format!("{emulator}: {why}"), &remedy),
        });
    }
    if let (Some(true), Some(retains)) = (device.retain, host.and_then(|host| host.retains)) {
        let check = Check::new("retain", name);
        findings.push(match retains {
            true => check.good("the daemon knows retained pages"),
            false => check.fault(
                "the domain's device has retain=on, and the daemon does not know retained pages: QEMU \
                 refuses the daemon, and the VM has no cache",
                &format!("update tmemd, or {attach} --retain off, and restart the domain"),
            ),
        });
    }
    if let (true, Some(served)) = (seen.active, host.and_then(|host| host.served)) {
        let check = Check::new("served", name);
        let vm = served
            .iter()
            .find(|vm| vm.uuid.as_deref() == Some(&domain.uuid) || vm.socket == device.socket);
        findings.push(match vm {
            None => check.fault(
                "the domain runs with the device, but the daemon does not serve it",
                "start or restart tmem-libvirt, which registers running VMs with the daemon (docs/libvirt.md)",
            ),
            Some(vm) if vm.socket != device.socket => check.fault(
                format!(
                    "the domain's device connects to {}, but the daemon serves the VM at {}",
                    device.socket, vm.socket
                ),
                &format!("{attach}, and restart the domain"),
            ),
            Some(_) => check.good("the daemon serves the domain"),
        });
        if let (Ok(true), Some(vm), Some(free)) = (&domain.reporting, vm, seen.free_bytes) {
            findings.extend(check_returned(name, vm, free));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::super::finding::State;
    use super::*;

    const UUID: &str = "5ca1ab1e-0000-4000-8000-0123456789ab";
    const PLAIN: &str = "<domain type='qemu'><name>web</name>\
        <uuid>5ca1ab1e-0000-4000-8000-0123456789ab</uuid><memory unit='MiB'>512</memory>\
        <os><type arch='x86_64' machine='q35'>hvm</type></os>\
        <devices><emulator>/usr/bin/qemu</emulator></devices></domain>";

    fn attached() -> String {
        tmem_libvirt::domain::attach(PLAIN, &tmem_libvirt::domain::Options::default())
            .expect("cannot attach the device")
    }

    fn seen(xml: &str) -> Seen {
        Seen {
            xml: xml.into(),
            active: true,
            free_bytes: None,
        }
    }

    fn served(xml: &str) -> api::Vm {
        let device = Domain::parse(xml)
            .expect("the XML of the domain was refused")
            .device
            .expect("the domain does not have the device");
        api::Vm {
            name: "web".into(),
            uuid: Some(UUID.into()),
            socket: device.socket,
            trust_domain: None,
            quota: api::quota(None, None, None),
            connected: true,
            problem: None,
            frozen: false,
            memory_bytes: None,
            memory_resident_bytes: None,
            pages: None,
            charged_bytes: None,
        }
    }

    fn faults_with(
        xml: &str,
        served: Option<&[api::Vm]>,
        emulator: Result<bool, String>,
    ) -> Vec<&'static str> {
        let emulator = emulator.map(|has_device| Emulator {
            has_device,
            has_retain: false,
            has_swap: false,
        });
        faults(
            xml,
            &Host {
                served,
                retains: None,
                ask: &|_| emulator.clone(),
            },
        )
    }

    fn faults(xml: &str, host: &Host) -> Vec<&'static str> {
        let found = check_domain(&seen(xml), Some(host));
        let faults = found.iter().filter(|finding| finding.state == State::Fault);
        faults.map(|finding| finding.check).collect()
    }

    #[test]
    fn doctor_finds_each_fault_of_a_domain() {
        let xml = attached();
        let vm = served(&xml);
        let vms = std::slice::from_ref(&vm);
        assert!(
            faults_with(PLAIN, Some(vms), Ok(false)).is_empty(),
            "doctor reports a fault of a domain without the device, which needs no cache"
        );
        let elsewhere = check_domain(&seen(&xml), None);
        assert!(
            elsewhere.iter().all(|finding| finding.state == State::Good),
            "doctor reports a fault of a domain on another host: {elsewhere:?}"
        );
        assert!(faults_with(&xml, Some(vms), Ok(true)).is_empty());
        assert!(
            faults_with(&xml, None, Ok(true)).is_empty(),
            "doctor reports a fault of the domain although it could not ask the daemon"
        );
        assert_eq!(faults_with(&xml, Some(vms), Ok(false)), ["emulator"]);
        assert_eq!(faults_with(&xml, Some(vms), Err("no".into())), ["emulator"]);
        assert_eq!(faults_with(&xml, Some(&[]), Ok(true)), ["served"]);
        let elsewhere = api::Vm {
            socket: "/else".into(),
            ..vm.clone()
        };
        assert_eq!(faults_with(&xml, Some(&[elsewhere]), Ok(true)), ["served"]);
        let private = xml
            .replace("mode='shared'", "mode='private'")
            .replace("mode=\"shared\"", "mode=\"private\"");
        assert_ne!(private, xml);
        assert_eq!(
            faults_with(&private, Some(vms), Ok(true)),
            ["shared-memory"]
        );
        let cut = xml
            .find("<qemu:commandline")
            .expect("the domain has no QEMU options");
        let end = xml
            .find("</qemu:commandline>")
            .expect("the element of QEMU options is not closed")
            + "</qemu:commandline>".len();
        let without = format!("{}{}", &xml[..cut], &xml[end..]);
        assert_eq!(faults_with(&without, Some(vms), Ok(true)), ["device"]);
        assert_eq!(faults_with("<domain>", Some(vms), Ok(true)), ["domain"]);
    }

    #[test]
    fn doctor_warns_of_a_guest_that_could_return_memory() {
        let state = |balloon: &str| {
            let xml = attached().replace("<devices>", &format!("<devices>{balloon}"));
            assert!(xml.contains(balloon));
            let found = check_domain(&seen(&xml), None);
            let of_check = found
                .iter()
                .find(|finding| finding.check == "free-page-reporting");
            of_check.expect("the check has no finding").state
        };
        assert_eq!(state(""), State::Good);
        assert_eq!(state("<memballoon model='none'/>"), State::Good);
        assert_eq!(state("<memballoon model='virtio'/>"), State::Warning);
        let with = |value| format!("<memballoon model='virtio' freePageReporting='{value}'/>");
        assert_eq!(state(&with("on")), State::Good);
        assert_eq!(state(&with("off")), State::Good);
        let vfio = "<hostdev mode='subsystem' type='pci'/>";
        assert_eq!(state(vfio), State::Good);
        assert_eq!(state(&format!("{}{vfio}", with("on"))), State::Warning);
    }

    #[test]
    fn doctor_warns_of_reports_of_free_huge_pages() {
        let xml = attached().replace(
            "<source type='memfd'/>",
            "<hugepages/><source type='memfd'/>",
        );
        assert!(xml.contains("<hugepages/>"));
        let check = |xml: &str| {
            let found = check_domain(&seen(xml), None);
            let of_check = found
                .into_iter()
                .find(|finding| finding.check == "free-page-reporting");
            of_check.expect("the check has no finding")
        };
        let with = |more: &str| {
            let balloon = format!("<devices><memballoon model='virtio'{more}/>");
            check(&xml.replace("<devices>", &balloon))
        };
        for (more, state) in [
            ("", State::Good),
            (" freePageReporting='on'", State::Warning),
        ] {
            let found = with(more);
            assert_eq!(found.state, state, "{found:?}");
            assert!(found.text.contains("huge pages"), "{found:?}");
        }
    }

    #[test]
    fn doctor_warns_of_freed_memory_that_is_still_resident() {
        const GIB: i64 = 1 << 30;
        let xml = attached().replace(
            "<devices>",
            "<devices><memballoon model='virtio' freePageReporting='on'/>",
        );
        let state = |resident: i64, free: Option<i64>| {
            let mut vm = served(&xml);
            vm.memory_bytes = Some(4 * GIB);
            vm.memory_resident_bytes = Some(resident);
            let host = Host {
                served: Some(std::slice::from_ref(&vm)),
                retains: None,
                ask: &|_| Err(String::new()),
            };
            let seen = Seen {
                free_bytes: free.map(i64::cast_unsigned),
                ..seen(&xml)
            };
            let found = check_domain(&seen, Some(&host));
            let mut found = found.iter();
            Some(found.find(|each| each.check == "freed-memory")?.state)
        };
        assert_eq!(state(4 * GIB, None), None);
        assert_eq!(state(4 * GIB, Some(3 * GIB)), Some(State::Warning));
        assert_eq!(state(3 * GIB, Some(3 * GIB)), Some(State::Warning));
        assert_eq!(state(2 * GIB, Some(3 * GIB)), Some(State::Good));
        assert_eq!(state(4 * GIB, Some(KEPT_BYTES_MIN)), Some(State::Good));
        assert_eq!(state(4 * GIB, Some(i64::MAX)), Some(State::Warning));
    }

    #[test]
    fn doctor_reports_properties_that_emulator_or_daemon_lacks() {
        let options = |retain, swap| tmem_libvirt::domain::Options {
            retain,
            swap,
            ..Default::default()
        };
        for has_swap in [false, true] {
            let xml = tmem_libvirt::domain::attach(PLAIN, &options(None, true))
                .expect("cannot attach the device");
            let ask = |_: &str| {
                Ok(Emulator {
                    has_device: true,
                    has_retain: true,
                    has_swap,
                })
            };
            let host = Host {
                served: None,
                retains: None,
                ask: &ask,
            };
            assert_eq!(faults(&xml, &host).is_empty(), has_swap);
        }
        for retain in [None, Some(false), Some(true)] {
            let xml = tmem_libvirt::domain::attach(PLAIN, &options(retain, false))
                .expect("cannot attach the device");
            for retains in [None, Some(false), Some(true)] {
                for has_retain in [false, true] {
                    let ask = |_: &str| {
                        Ok(Emulator {
                            has_device: true,
                            has_retain,
                            has_swap: false,
                        })
                    };
                    let host = Host {
                        served: None,
                        retains,
                        ask: &ask,
                    };
                    let mut expected = Vec::new();
                    if retain.is_some() && !has_retain {
                        expected.push("emulator");
                    }
                    if (retain, retains) == (Some(true), Some(false)) {
                        expected.push("retain");
                    }
                    assert_eq!(faults(&xml, &host), expected);
                }
            }
        }
    }
}
