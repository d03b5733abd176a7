// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Generates random domains, and tests for each domain what attach and detach guarantee.
//!
//! A failed test prints the seed of the domain. `TMEM_SEED` repeats the test with one seed.

use roxmltree::{Document, Node};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use tmem_libvirt::domain::{Cache, Domain, Options, attach, detach};

/// Number of random domains that a run of the test generates.
const ROUNDS: u64 = 500;

/// Picks one of several strings at random.
fn choose<'a>(rng: &mut fastrand::Rng, from: &[&'a str]) -> &'a str {
    from[rng.usize(..from.len())]
}

/// Generates text that a person or a program might put between elements: a comment, a processing
/// instruction or white space.
fn filler(rng: &mut fastrand::Rng) -> String {
    let tag = rng.u32(..);
    match rng.u8(..8) {
        0 => format!("<!-- mine {tag}: <memoryBacking/> & \"more\" -->"),
        1 => format!("<?keep this='{tag}>'?>"),
        2 => "\n\t ".into(),
        3 => "\r\n".into(),
        _ => "\n  ".into(),
    }
}

/// Quotes an attribute's value with single or double quotation marks, at random.
fn quoted(rng: &mut fastrand::Rng, value: &str) -> String {
    let quote = choose(rng, &["'", "\""]);
    format!("{quote}{value}{quote}")
}

/// Generates a device at random. It occupies a slot of the PCI root bus, is on another bus, or has
/// no address. `slots` gets the slot that it occupies.
fn device(rng: &mut fastrand::Rng, slots: &mut Vec<u8>) -> String {
    let slot = rng.u8(1..=31);
    let mac = rng.u32(..);
    match rng.u8(..3) {
        0 => {
            slots.push(slot);
            format!(
                "<interface type='network'><source network='a&amp;b &#60;{mac}&gt;'/>\
                 <address type={} domain='0x0000' bus='0x00' slot={} function='0x0'/></interface>",
                quoted(rng, "pci"),
                quoted(rng, &format!("{slot:#04x}"))
            )
        }
        1 => format!(
            "<hostdev mode='subsystem' type='pci' managed='yes'><source><address domain='0x0000' \
             bus='0x00' slot='{slot:#04x}' function='0x0'/></source><address type='pci' bus='0x05' \
             slot='0x00'/></hostdev>"
        ),
        _ => format!(
            "<disk type='file' \n device = 'disk' ><target dev='vd{mac}'/><![CDATA[</disk>&]]></disk>"
        ),
    }
}

struct Made {
    text: String,
    slots: Vec<u8>,
}

/// Generates the balloon, or no balloon, at random.
fn balloon(rng: &mut fastrand::Rng) -> &'static str {
    choose(
        rng,
        &[
            "",
            "<memballoon model='none'/>",
            "<memballoon model='virtio'/>",
            "<memballoon\n model = \"virtio\" ></memballoon>",
            "<memballoon model='virtio-non-transitional' autodeflate='off'>\
             <stats period='10'/></memballoon>",
            "<memballoon freePageReporting='off' model='virtio'/>",
            "<memballoon model='virtio' freePageReporting='on' note='a>b'/>",
        ],
    )
}

fn memory_backing(rng: &mut fastrand::Rng) -> String {
    let source = choose(
        rng,
        &[
            "",
            "<source type='memfd'/>",
            "<source type=\"anonymous\" />",
            "<source type='file'/>",
        ],
    );
    let access = choose(
        rng,
        &[
            "",
            "<access mode='shared'/>",
            "<access  mode = \"pri&#118;ate\"/>",
        ],
    );
    let rest = choose(rng, &["", "<hugepages/>", "<locked/><!-- keep -->"]);
    match rng.u8(..5) {
        0 => String::new(),
        1 => "<memoryBacking/>".into(),
        2 => "<memoryBacking note='a>b' />".into(),
        _ => format!(
            "<memoryBacking>{}{source}{rest}{access}{}</memoryBacking>",
            filler(rng),
            filler(rng)
        ),
    }
}

fn commandline(rng: &mut fastrand::Rng, slots: &mut Vec<u8>) -> (String, &'static str) {
    let slot = rng.u8(1..=31);
    let argument = format!("edu,bus=pcie.0,addr={slot:x}");
    match rng.u8(..5) {
        0 | 1 => (String::new(), ""),
        2 => ("<qemu:commandline/>".into(), "qemu"),
        3 => {
            slots.push(slot);
            (
                format!(
                    "<qemu:commandline>{}<qemu:arg value='-device'/><qemu:arg \
                     value='{argument}'/><qemu:env name='A' value='b'/></qemu:commandline>",
                    filler(rng)
                ),
                "qemu",
            )
        }
        _ => {
            slots.push(slot);
            (
                format!(
                    "<q:commandline><q:arg value='-device'/><q:arg value=\"{argument}\"/></q:commandline >"
                ),
                "q",
            )
        }
    }
}

fn domain(rng: &mut fastrand::Rng) -> Made {
    let mut slots = Vec::new();
    let (commandline, prefix) = commandline(rng, &mut slots);
    let namespace = match prefix {
        "" => String::new(),
        prefix => format!(
            " xmlns:{prefix}={}",
            quoted(rng, "http://libvirt.org/schemas/domain/qemu/1.0")
        ),
    };
    let mut devices = String::new();
    if rng.bool() {
        devices += &format!(
            "<emulator>{}</emulator>",
            choose(rng, &["/usr/bin/qemu-system-x86_64", " /opt/q&amp;a ", ""])
        );
    }
    for _ in 0..rng.u8(..6) {
        devices += &filler(rng);
        devices += &device(rng, &mut slots);
    }
    devices += balloon(rng);
    let metadata = match rng.u8(..4) {
        0 => String::new(),
        1 => "<metadata/>".into(),
        2 => format!("<metadata>{}</metadata>", filler(rng)),
        _ => "<metadata><os:id xmlns:os='urn:os' v='cache'/><cache xmlns='urn:other'/></metadata>"
            .into(),
    };
    let mut parts = vec![
        "<name>v&amp;m</name>".to_string(),
        "<uuid>01234567-89AB-cdef-0123-456789abcdef</uuid>".into(),
        metadata,
        "<memory unit='KiB'>1048576</memory>".into(),
        memory_backing(rng),
        format!(
            "<os><type arch='x86_64' machine={}>hvm</type></os>",
            quoted(rng, "pc-q35-7.2")
        ),
        format!("<devices>{devices}</devices>"),
        commandline,
    ];
    if rng.bool() {
        rng.shuffle(&mut parts);
    }
    let mut text = choose(
        rng,
        &[
            "",
            "<?xml version='1.0'?>\n",
            "<!-- WARNING: edit with virsh -->\n",
        ],
    )
    .to_string();
    text += &format!("<domain{namespace} type={}>", quoted(rng, "kvm"));
    for part in parts {
        text += &filler(rng);
        text += &part;
    }
    text += &filler(rng);
    Made {
        text: text + "</domain>\n",
        slots,
    }
}

fn options(rng: &mut fastrand::Rng) -> Options {
    let reserve = rng.bool().then(|| rng.u64(..1 << 30));
    Options {
        cache: Cache {
            limit: rng
                .bool()
                .then(|| reserve.unwrap_or(0) + rng.u64(..1 << 30)),
            reserve,
            weight: rng.bool().then(|| rng.u32(..=10_000)),
            trust_domain: rng.bool().then(|| "web.1".into()),
            required: rng.bool(),
        },
        socket_directory: choose(rng, &["/run/virtio-tmem", "/srv/a,b & 'c'"]).into(),
        emulator: rng
            .bool()
            .then(|| choose(rng, &["/opt/qemu", "/opt/q<a>"]).into()),
        retain: rng.bool().then(|| rng.bool()),
        swap: rng.bool(),
    }
}

/// Returns true if inserting text into `part` anywhere, without removing any, can result in
/// `whole`.
fn is_within(part: &str, whole: &str) -> bool {
    let mut rest = whole.bytes();
    part.bytes().all(|byte| rest.any(|other| other == byte))
}

/// Lists the nodes of an XML text. The list has no white space between elements, and does not
/// distinguish `<a/>` from `<a></a>`.
fn nodes(text: &str) -> Vec<String> {
    let document = Document::parse(text).expect("the generated text is not XML");
    let nodes = document.root().descendants();
    let blank = |node: &Node| node.is_text() && node.text().unwrap_or("").trim().is_empty();
    let nodes = nodes.filter(|node| !blank(node));
    nodes
        .map(|node| {
            let attributes: Vec<_> = node.attributes().collect();
            let (parent, kind) = (
                node.parent_element().map(|p| p.tag_name()),
                node.node_type(),
            );
            let (name, text, pi) = (
                node.tag_name(),
                node.text().filter(|_| !node.is_element()),
                node.pi(),
            );
            format!("{parent:?} {kind:?} {name:?} {attributes:?} {text:?} {pi:?}")
        })
        .collect()
}

fn check(seed: u64) {
    let rng = &mut fastrand::Rng::with_seed(seed);
    let made = domain(rng);
    let options = options(rng);
    let attached =
        attach(&made.text, &options).expect("cannot attach the device to the generated domain");

    // The changed domain has the requested device, memory and quota.
    let read = Domain::parse(&attached).expect("the domain with the attached device is not valid");
    let device = read.device.expect("the domain has no device after attach");
    assert_eq!(read.memory, Ok(()));
    assert_eq!(read.cache, Some(Ok(options.cache.clone())));
    assert!(device.ours);
    let socket = "01234567-89ab-cdef-0123-456789abcdef.sock";
    assert_eq!(
        device.socket,
        format!("{}/{socket}", options.socket_directory)
    );
    if options.emulator.is_some() {
        assert_eq!(read.emulator, options.emulator);
    }
    // The guest returns free memory, if it can and the domain does not say otherwise.
    let cannot = [
        "<hugepages/>",
        "<hostdev",
        "model='none'",
        "freePageReporting='off'",
    ];
    let can =
        made.text.contains("<memballoon") && !cannot.iter().any(|part| made.text.contains(part));
    let has = made.text.contains("freePageReporting='on'");
    assert_eq!(attached.contains("freePageReporting='on'"), can || has);
    assert_eq!(read.reporting == Ok(true), can);

    let slot = attached
        .split("bus=pcie.0,addr=0x")
        .nth(1)
        .expect("the device has no PCI address");
    let slot =
        u8::from_str_radix(&slot[..2], 16).expect("the PCI slot is not a hexadecimal number");
    assert!(
        !made.slots.contains(&slot),
        "the device got slot {slot}, which another device uses: {:?}",
        made.slots
    );

    // attach has only inserted text. This is not checked if attach had to replace a value that the
    // domain contained.
    let known = [
        "anonymous",
        "'file'",
        "pri&#118;ate",
        "/usr/bin/qemu-system-x86_64",
        " /opt/q&amp;a ",
    ];
    if !known.iter().any(|value| made.text.contains(value)) {
        let opened = ["<memoryBacking", "<metadata", "<qemu:commandline"];
        let mut before = made.text.clone();
        for tag in opened {
            for end in ["/>", " note='a>b' />"] {
                before = before.replace(
                    &format!("{tag}{end}"),
                    &format!("{tag}{}", end.replace("/>", ">")),
                );
            }
        }
        assert!(is_within(&before, &attached));
    }

    // A second attach with the same options changes nothing. An attach with other options does not
    // change what detach returns.
    assert_eq!(attach(&attached, &options).as_ref(), Ok(&attached));
    let other = self::options(rng);
    let changed = attach(&attached, &other).expect("cannot change the attached device");
    assert_eq!(attach(&changed, &other).as_ref(), Ok(&changed));

    for text in [&attached, &changed, &made.text] {
        let detached = detach(text).expect("cannot detach the device");
        assert_eq!(nodes(&detached), nodes(&made.text));
    }
}

#[test]
fn detach_restores_the_xml_of_randomly_generated_domains() {
    let first = match std::env::var("TMEM_SEED") {
        Ok(seed) => return check(seed.parse().expect("TMEM_SEED is not a number")),
        Err(_) => fastrand::u64(..),
    };
    println!("seeds from {first}");
    for seed in (0..ROUNDS).map(|round| first.wrapping_add(round)) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| check(seed))) {
            println!(
                "TMEM_SEED={seed}\n{}",
                domain(&mut fastrand::Rng::with_seed(seed)).text
            );
            resume_unwind(panic);
        }
    }
}
