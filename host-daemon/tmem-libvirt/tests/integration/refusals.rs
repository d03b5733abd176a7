// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of domains that cannot have the device, and of domains that were changed after attach.

use tmem_libvirt::domain::{Cache, Domain, Options, attach, detach};

fn domain(inside: &str) -> String {
    format!(
        "<domain type='kvm'>\n  <name>a</name>\n  <uuid>01234567-89ab-cdef-0123-456789abcdef</uuid>\n  \
         <os>\n    <type machine='pc-i440fx-7.2'>hvm</type>\n  </os>\n{inside}</domain>\n"
    )
}

const DEVICES: &str =
    "  <devices>\n    <emulator>/usr/bin/qemu-system-x86_64</emulator>\n  </devices>\n";

#[test]
fn unsupported_domains_are_refused_with_a_reason() {
    let by_hand = "<q:commandline xmlns:q='http://libvirt.org/schemas/domain/qemu/1.0'><q:arg \
                   value='-chardev'/><q:arg value='socket,id=c,path=/a'/><q:arg \
                   value='-device'/><q:arg value='vhost-user-tmem-pci,chardev=c'/></q:commandline>";
    let full: String = (3..32)
        .map(|slot| format!("<disk><address type='pci' bus='0x00' slot='{slot:#04x}'/></disk>"))
        .collect();
    for (text, parts) in [
        (domain(by_hand), &["domain a", "did not attach"][..]),
        (
            domain("<launchSecurity type='sev'/>"),
            &["encrypted", "'sev'"],
        ),
        (
            domain("<cpu><numa><cell id='1' memAccess='private'/></numa></cpu>"),
            &["cell 1", "private"],
        ),
        (
            domain(&format!("<devices>{full}</devices>")),
            &["pci.0", "taken"],
        ),
        (
            domain(DEVICES).replace("pc-i440fx-7.2", "microvm"),
            &["\"microvm\"", "q35"],
        ),
        (domain(DEVICES).replace("'kvm'", "'xen'"), &["\"xen\""]),
        (domain(DEVICES).replace("<name>a</name>", ""), &["<name>"]),
        ("<network/>".into(), &["<network>"]),
        ("<domain>".into(), &["not the XML"]),
    ] {
        let Err(error) = attach(&text, &Options::default()) else {
            panic!("the unsupported domain {text:?} was accepted");
        };
        let error = error.0;
        for part in parts {
            assert!(
                error.contains(part),
                "the error about {text} does not contain {part:?}: {error}"
            );
        }
    }
    let options = Options {
        cache: Cache {
            limit: Some(1 << 20),
            reserve: Some(2 << 20),
            ..Cache::default()
        },
        ..Options::default()
    };
    let error = attach(&domain(DEVICES), &options)
        .expect_err("a limit below the reserve was accepted")
        .0;
    assert!(
        error.contains("1024 KiB") && error.contains("2048 KiB"),
        "the error does not give both sizes: {error}"
    );
}

/// attach adds free page reporting where QEMU can return memory. If the domain is changed so that
/// QEMU cannot, a later attach removes what the first one added.
#[test]
fn attach_adds_and_removes_free_page_reporting() {
    let with = |balloon: &str, rest: &str, backing: &str| {
        let devices = format!("  <devices>\n    {balloon}\n    {rest}\n  </devices>\n");
        domain(&format!("{backing}{devices}"))
    };
    let virtio = "<memballoon model='virtio'/>";
    let added = "<memballoon freePageReporting='on' autodeflate='on' model='virtio'/>";
    let huge = "  <memoryBacking><hugepages/></memoryBacking>\n";
    let attach = |text: &str| attach(text, &Options::default()).expect("the domain was refused");
    for (balloon, rest, backing, expected) in [
        (virtio, "", "", Ok(added)),
        ("<memballoon model='none'/>", "", "", Err("no <memballoon")),
        ("", "", "", Err("no <memballoon")),
        (virtio, "", huge, Err("huge pages")),
        (
            virtio,
            "<hostdev mode='subsystem' type='pci'/>",
            "",
            Err("VFIO"),
        ),
        (
            virtio,
            "<hostdev mode='subsystem' type='mdev'/>",
            "",
            Err("VFIO"),
        ),
        (
            virtio,
            "<hostdev mode='subsystem' type='usb'/>",
            "",
            Ok(added),
        ),
        (virtio, "<interface type='hostdev'/>", "", Err("VFIO")),
        (virtio, "<interface type='vdpa'/>", "", Err("VFIO")),
        (virtio, "<disk type='vhostvdpa'/>", "", Err("VFIO")),
        (
            "<memballoon model='virtio' freePageReporting='off'/>",
            "",
            "",
            Err("has freePageReporting='off'"),
        ),
    ] {
        let before = with(balloon, rest, backing);
        let after = attach(&before);
        let reporting = Domain::parse(&after)
            .expect("the domain is not valid")
            .reporting;
        match expected {
            Ok(added) => {
                assert!(after.contains(added), "{after}");
                assert_eq!(reporting, Ok(true));
                assert_eq!(detach(&after).as_ref(), Ok(&before));
            }
            Err(reason) => {
                assert!(!after.contains("='on'"), "{after}");
                let error = reporting.expect_err("the domain returns memory").0;
                assert!(
                    error.contains(reason),
                    "{error} does not contain {reason:?}"
                );
            }
        }
    }
    // libvirt writes the attributes in an order of its own, and adds the address.
    let before = with(virtio, "", "");
    let rewritten = "<memballoon model='virtio' autodeflate='on' freePageReporting='on'>\n      \
                     <address type='pci' slot='0x06'/>\n    </memballoon>";
    let after = attach(&before).replace(added, rewritten);
    assert_eq!(attach(&after), after, "a second attach changes the domain");
    let detached = detach(&after).expect("cannot detach the device");
    assert!(
        detached.contains("<memballoon model='virtio'>\n"),
        "{detached}"
    );
    // The user has turned it off after attach.
    let off = after.replace("freePageReporting='on'", "freePageReporting='off'");
    let detached = detach(&off).expect("cannot detach the device");
    assert!(
        detached.contains("<memballoon model='virtio' freePageReporting='off'>\n"),
        "{detached}"
    );
    // The user has given the domain huge pages after attach.
    let huge = attach(&before).replace("<memoryBacking>", "<memoryBacking><hugepages/>");
    let again = attach(&huge);
    assert!(
        again.contains(virtio) && !again.contains("tmem-undo:added"),
        "{again}"
    );
}

#[test]
fn memory_that_the_daemon_cannot_map_is_reported_with_the_remedy() {
    for (backing, part) in [
        ("", "no <access mode='shared'/>"),
        (
            "<memoryBacking><access mode='private'/></memoryBacking>",
            "mode='private'",
        ),
        (
            "<memoryBacking><access mode='shared'/></memoryBacking>",
            "no <source type='memfd'/>",
        ),
        (
            "<memoryBacking><source type='file'/><access mode='shared'/></memoryBacking>",
            "type='file'",
        ),
    ] {
        let error = Domain::parse(&domain(backing))
            .expect("a valid domain was refused")
            .memory;
        let Err(error) = error else {
            panic!("memory with the backing {backing:?} was accepted");
        };
        let error = error.0;
        assert!(
            error.contains(part) && error.contains("tmemctl attach"),
            "the error does not name the fault and the remedy: {error}"
        );
    }
}

#[test]
fn attach_takes_and_keeps_the_highest_free_pci_slot() {
    let attached = attach(&domain(DEVICES), &Options::default()).expect("cannot attach the device");
    assert!(
        attached.contains("bus=pci.0,addr=0x1f"),
        "the device has the wrong PCI address: {attached}"
    );
    let plugged = attached.replace(
        "  </devices>",
        "    <rng><address type='pci' bus='0x00' slot='0x1e'/></rng>\n  </devices>",
    );
    assert_eq!(attach(&plugged, &Options::default()), Ok(plugged));
}

#[test]
fn attaching_to_a_cloned_domain_sets_its_own_socket_path() {
    let attached = attach(&domain(DEVICES), &Options::default()).expect("cannot attach the device");
    let uuid = "fedcba98-89ab-cdef-0123-456789abcdef";
    let head = "<uuid>";
    let clone = attached.replace(
        &format!("{head}01234567-89ab"),
        &format!("{head}fedcba98-89ab"),
    );
    let socket = |text: &str| {
        Domain::parse(text)
            .expect("a valid domain was refused")
            .device
            .expect("the domain does not have the device")
            .socket
    };
    assert_eq!(socket(&clone), socket(&attached));
    let again = attach(&clone, &Options::default()).expect("cannot attach the device");
    assert_eq!(socket(&again), format!("/run/virtio-tmem/{uuid}.sock"));
}

#[test]
fn detach_keeps_changes_made_after_attach() {
    let options = Options {
        emulator: Some("/opt/qemu".into()),
        ..Options::default()
    };
    let attached = attach(&domain(DEVICES), &options).expect("cannot attach the device");
    let changed = attached.replace("/opt/qemu<", "/opt/newer<").replace(
        "    <source type='memfd'/>",
        "    <hugepages/>\n    <source type='memfd'/>",
    );
    assert_ne!(changed, attached);
    let left = detach(&changed).expect("cannot detach the device");
    let expected = domain(DEVICES)
        .replace("/usr/bin/qemu-system-x86_64", "/opt/newer")
        .replace(
            "-456789abcdef</uuid>",
            "-456789abcdef</uuid>\n  <memoryBacking>\n    <hugepages/>\n  </memoryBacking>",
        );
    assert_eq!(left, expected);
}

#[test]
fn attach_replaces_and_detach_removes_a_quota_set_by_virsh() {
    let attached = attach(&domain(DEVICES), &Options::default()).expect("cannot attach the device");
    let element = "<tmem:cache xmlns:tmem=\"urn:virtio-tmem:cache:1\" required=\"no\"/>";
    assert!(
        attached.contains(element),
        "the domain has no {element}: {attached}"
    );
    let set = attached.replace(
        element,
        "<t:cache xmlns:t='urn:virtio-tmem:cache:1'><t:limit>7</t:limit></t:cache>",
    );
    let cache = Domain::parse(&set)
        .expect("a valid domain was refused")
        .cache
        .expect("the domain has no cache element")
        .expect("a valid cache element was refused");
    assert_eq!(cache.limit, Some(7 << 10));
    assert_eq!(detach(&set), Ok(domain(DEVICES)));
    assert_eq!(attach(&set, &Options::default()), Ok(attached));
}

#[test]
fn the_user_of_a_domain_is_read_from_its_dac_seclabel() {
    let user = |labels: &str| {
        let domain = Domain::parse(&domain(labels));
        domain.expect("a valid domain was refused").user
    };
    let dac =
        "<seclabel type='static' model='dac' relabel='yes'><label>+107:+36</label></seclabel>";
    let selinux = "<seclabel type='dynamic' model='selinux'><label>a:b:c</label></seclabel>";
    assert_eq!(user(&format!("{selinux}{dac}")).as_deref(), Some("+107"));
    assert_eq!(
        user(&dac.replace("+107:+36", " qemu ")).as_deref(),
        Some("qemu")
    );
    for none in ["", selinux, "<seclabel type='none' model='dac'/>"] {
        assert_eq!(
            user(none),
            None,
            "parse() found a user in the label {none:?}"
        );
    }
}
