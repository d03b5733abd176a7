// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Commands `attach`, `detach` and `quota` for libvirt domains.
//!
//! tmemctl prints the XML of a domain without its secrets, such as passwords. It writes XML back to
//! libvirt with them.

use crate::args::{QuotaArguments, QuotaValues, Target};
use crate::client::{connect as connect_daemon, knows_retained_pages, refused};
use crate::exit::{Code, Failure};
use crate::output::Output;
use crate::reach::{Reach, within};
use crate::retain::{self, Facts, Retain};
use crate::show::{quota_json, quota_text};
use crate::table::row;
use crate::{emulator, packaged};
use clap::Args;
use similar::TextDiff;
use std::path::Path;
use std::time::Duration;
use tmem_control as api;
use tmem_control::VarlinkClientInterface;
use tmem_libvirt::domain::{CACHE_NAMESPACE, CACHE_PREFIX, Cache, DEVICE, Options};
use virt::connect::Connect;
use virt::domain::Domain;
use virt::error::{Error, ErrorNumber};
use virt_sys as sys;

/// Number of unchanged lines that a diff shows before and after each change.
const DIFF_CONTEXT_LINES: usize = 2;

/// Options to preview a change of XML.
#[derive(Args, Clone)]
pub struct Preview {
    /// Change the next start (the default). A running VM cannot be changed: libvirt only passes the
    /// device on to QEMU when the VM starts
    #[arg(long = "config")]
    _config: bool,
    /// Show what would change, and change nothing
    #[arg(long)]
    dry_run: bool,
    /// Print the complete new XML, and change nothing
    #[arg(long)]
    print_xml: bool,
}

/// Options of attach.
#[derive(Args, Clone)]
pub struct AttachArguments {
    /// The domain to attach the device to, and the URI of the libvirt that has it.
    #[command(flatten)]
    pub target: Target,
    #[command(flatten)]
    quota: QuotaValues,
    /// Trust domain: its VMs share equal pages, and can detect pages of each other; none: the VM
    /// shares pages with no other VM
    #[arg(long, value_name = "NAME|none")]
    trust_domain: Option<String>,
    /// Whether the start of the VM fails if the daemon cannot serve the VM [default: no]
    #[arg(long, value_name = "yes|no", value_parser = ["yes", "no"])]
    required: Option<String>,
    /// QEMU that has the device [default: the domain's own, or /usr/bin/qemu-system-x86_64-tmem if
    /// the domain's own lacks the device]
    #[arg(long, value_name = "PATH")]
    emulator: Option<String>,
    /// Whether the guest's driver may leave pages in the pool that it has in its page cache
    /// (retained pages). auto: on if the domain's QEMU and the running daemon know them; on: in any
    /// case, and QEMU refuses a daemon that does not know them [default: auto for a new device,
    /// otherwise unchanged]
    #[arg(long, value_name = "on|off|auto", hide_possible_values = true)]
    retain: Option<Retain>,
    /// Whether the guest's driver caches swap areas, in pools that share no page with other
    /// VMs [default: off for a new device, otherwise unchanged]
    #[arg(long, value_name = "on|off", value_parser = ["on", "off"], hide_possible_values = true)]
    swap: Option<String>,
    /// Run directory of the daemon, where the VM's socket is [default: /run/virtio-tmem]
    #[arg(long, value_name = "PATH")]
    run_directory: Option<String>,
    #[command(flatten)]
    preview: Preview,
}

/// Options of detach.
#[derive(Args, Clone)]
pub struct DetachArguments {
    /// The domain to detach the device from, and the URI of the libvirt that has it.
    #[command(flatten)]
    pub target: Target,
    #[command(flatten)]
    preview: Preview,
}

impl From<tmem_libvirt::domain::Error> for Failure {
    fn from(error: tmem_libvirt::domain::Error) -> Failure {
        Failure(error.0, Code::Refused)
    }
}

impl Target {
    /// Creates the output of a command that changes a domain's XML. The JSON output consists of the
    /// domain's name and `text`.
    fn output(&self, text: String) -> Output {
        let json = serde_json::json!({ "domain": self.domain, "text": text });
        Output { text, json }
    }

    fn failure(&self, what: &str, error: &Error) -> Failure {
        Failure(
            format!("domain {}: {what}: {}", self.domain, error.message()),
            Code::Refused,
        )
    }

    pub fn connect(&self, read_only: bool) -> Result<Connect, Failure> {
        // Without this call, libvirt would also print each error to stderr.
        virt::error::clear_error_callback();
        let uri = Some(self.connect.as_str());
        let connection = match read_only {
            true => Connect::open_read_only(uri),
            false => Connect::open(uri),
        };
        connection.map_err(|error| {
            let what = format!(
                "cannot connect to libvirt at {}: {}",
                self.connect,
                error.message()
            );
            Failure(what, Code::Unreachable)
        })
    }

    /// Finds the domain whose name or UUID is `key`; returns None if libvirt has no such domain.
    pub fn find(&self, connection: &Connect, key: &str) -> Result<Option<Domain>, Failure> {
        let found = Domain::lookup_by_name(connection, key);
        let found = found.or_else(|error| match error.code() {
            ErrorNumber::NoDomain => Domain::lookup_by_uuid_string(connection, key),
            _ => Err(error),
        });
        match found {
            Ok(domain) => Ok(Some(domain)),
            Err(error) => match error.code() {
                // libvirt reports NoDomain for an unknown UUID, and InvalidArg if `key` is not a
                // UUID.
                ErrorNumber::NoDomain | ErrorNumber::InvalidArg => Ok(None),
                _ => Err(self.failure("the domain cannot be looked up", &error)),
            },
        }
    }

    pub fn no_domain(&self) -> Failure {
        let what = format!(
            "libvirt at {} has no domain {:?}: see virsh list --all",
            self.connect, self.domain
        );
        Failure(what, Code::NotFound)
    }

    fn open(&self) -> Result<(Connect, Domain), Failure> {
        let connection = self.connect(false)?;
        let found = self.find(&connection, &self.domain)?;
        let domain = found.ok_or_else(|| self.no_domain())?;
        Ok((connection, domain))
    }

    /// Returns the XML with which libvirt starts the domain the next time. The XML contains
    /// secrets, such as passwords, only if `secure` is true.
    fn config(&self, domain: &Domain, secure: bool) -> Result<String, Failure> {
        let secure = if secure {
            sys::VIR_DOMAIN_XML_SECURE
        } else {
            0
        };
        domain
            .get_xml_desc(sys::VIR_DOMAIN_XML_INACTIVE | secure)
            .map_err(|error| self.failure("the domain's XML cannot be read", &error))
    }

    /// Changes the XML with which libvirt starts the domain the next time. First, `check` returns
    /// facts for `change` and a note for the user, which is empty or one line. `check` may take
    /// some time. Then `change` returns the new XML.
    fn change<T>(
        &self,
        preview: &Preview,
        done: &str,
        check: impl Fn(&tmem_libvirt::domain::Domain) -> Result<(T, String), Failure>,
        change: impl Fn(&str, &T) -> Result<String, Failure>,
    ) -> Result<String, Failure> {
        let (connection, domain) = self.open()?;
        let failed = |error: Error| self.failure("the domain's state cannot be read", &error);
        if !domain.is_persistent().map_err(failed)? {
            return Err(Failure(
                format!(
                    "domain {} is transient: it has no XML for a next start. Add the device to \
                     the XML from which it is created",
                    self.domain
                ),
                Code::Refused,
            ));
        }
        let (facts, note) = check(&tmem_libvirt::domain::Domain::parse(
            &self.config(&domain, false)?,
        )?)?;
        // `check` may take some time, so the XML is read again before it is changed. Otherwise a
        // change that another program made meanwhile would be lost.
        let shown = self.config(&domain, false)?;
        let new = change(&shown, &facts)?;
        if preview.print_xml {
            return Ok(new);
        }
        if new == shown {
            return Ok(format!("{note}domain {}: nothing to change\n", self.domain));
        }
        let diff = TextDiff::from_lines(&shown, &new);
        let diff = diff
            .unified_diff()
            .context_radius(DIFF_CONTEXT_LINES)
            .to_string();
        if preview.dry_run {
            return Ok(diff + &note);
        }
        let new = change(&self.config(&domain, true)?, &facts)?;
        Domain::define_xml(&connection, &new)
            .map_err(|error| self.failure("libvirt refuses the change", &error))?;
        let mut text = format!("{diff}{note}\ndomain {}: {done}\n", self.domain);
        // libvirt has already stored the new XML, so a failure to read the domain's state is
        // ignored.
        if domain.is_active().unwrap_or(false) {
            text += "The domain runs: the change applies at its next start. A reboot in the guest is no start.\n";
        }
        if domain.has_managed_save(0).unwrap_or(false) {
            text += "The domain has a saved state, which is restored unchanged: the change applies after \
                     the next shutdown and start.\n";
        }
        Ok(text)
    }
}

/// Adds the virtio-tmem device to a libvirt domain, or changes the settings of its device.
pub fn attach(arguments: &AttachArguments, reach: &Reach) -> Result<Output, Failure> {
    let arguments = &with_packaged_emulator(arguments, reach.half_the_time())?;
    let target = &arguments.target;
    let check = |domain: &tmem_libvirt::domain::Domain| {
        let (connection, _) = target.open()?;
        check_acpi(domain, connection.get_lib_version().unwrap_or(u32::MAX))?;
        let emulator = check_emulator(arguments, domain, reach.half_the_time())?;
        let swap = wants_swap(arguments, domain.device.as_ref());
        if swap && emulator.is_some_and(|emulator| !emulator.has_swap) {
            return Err(Failure(
                format!(
                    "domain {}: the device {DEVICE} of its emulator has no property swap, so the \
                     VM would not start. Select a QEMU that has it with --emulator, or add --swap off",
                    target.domain
                ),
                Code::Refused,
            ));
        }
        decide_retain(arguments, domain, emulator, reach)
    };
    let done = "the device is attached";
    let text = target.change(&arguments.preview, done, check, |xml, retain| {
        let before = tmem_libvirt::domain::Domain::parse(xml)?;
        // If the user gives no option for a setting, the domain's metadata element keeps its value.
        // An invalid element counts as empty.
        let mut cache = before.cache.and_then(Result::ok).unwrap_or_default();
        arguments.quota.apply(&mut cache);
        match arguments.trust_domain.as_deref() {
            Some("none") => cache.trust_domain = None,
            Some(name) => cache.trust_domain = Some(name.into()),
            None => {}
        }
        if let Some(required) = &arguments.required {
            cache.required = required == "yes";
        }
        let device = before.device.filter(|device| device.ours);
        let swap = wants_swap(arguments, device.as_ref());
        let directory = device.and_then(|device| Some(device.socket.rsplit_once('/')?.0.into()));
        let directory = arguments.run_directory.clone().or(directory);
        let options = Options {
            cache,
            socket_directory: directory
                .unwrap_or_else(|| tmem_libvirt::domain::SOCKET_DIRECTORY.into()),
            emulator: arguments.emulator.clone(),
            retain: *retain,
            swap,
        };
        tmem_libvirt::domain::attach(xml, &options)
            .map_err(|error| Failure(format!("domain {}: {error}", target.domain), Code::Refused))
    });
    Ok(target.output(text?))
}

/// Returns the arguments of `tmemctl attach`, with the packaged QEMU as emulator if it must be
/// chosen. It must be chosen if the arguments name no emulator, the domain is on this host, and its
/// own QEMU lacks the device.
fn with_packaged_emulator(
    arguments: &AttachArguments,
    limit: Duration,
) -> Result<AttachArguments, Failure> {
    let mut arguments = arguments.clone();
    let path = Path::new(packaged::PATH);
    if arguments.emulator.is_none() && is_local(&arguments.target.connect) && path.exists() {
        let (_connection, domain) = arguments.target.open()?;
        let domain =
            tmem_libvirt::domain::Domain::parse(&arguments.target.config(&domain, false)?)?;
        let has_device = |own: &str| emulator::ask(own, limit).is_ok_and(|found| found.has_device);
        arguments.emulator = packaged::instead_of(domain.emulator.as_deref(), path, has_device);
    }
    Ok(arguments)
}

/// Removes the virtio-tmem device from a libvirt domain.
pub fn detach(arguments: &DetachArguments) -> Result<Output, Failure> {
    let target = &arguments.target;
    let text = target.change(
        &arguments.preview,
        "the device is detached",
        |_| Ok(((), String::new())),
        |xml, ()| Ok(tmem_libvirt::domain::detach(xml)?),
    )?;
    Ok(target.output(text))
}

/// Returns true if `uri` names a libvirt on this host, whose files and processes tmemctl can check.
pub fn is_local(uri: &str) -> bool {
    uri.split_once("://")
        .is_none_or(|(_, rest)| rest.starts_with('/'))
}

/// Returns the value of the device's property `swap`. `before` is the domain's present device.
fn wants_swap(arguments: &AttachArguments, before: Option<&tmem_libvirt::domain::Device>) -> bool {
    match arguments.swap.as_deref() {
        Some(swap) => swap == "on",
        None => before.is_some_and(|device| device.swap),
    }
}

/// Decides on the value of the device's property `retain`. Returns the value, and a note for the
/// user. The wait for the daemon is bounded. If the daemon does not answer in time, decides without
/// knowing whether the daemon supports retained pages.
fn decide_retain(
    arguments: &AttachArguments,
    domain: &tmem_libvirt::domain::Domain,
    emulator: Option<emulator::Emulator>,
    reach: &Reach,
) -> Result<(Option<bool>, String), Failure> {
    let setting = domain.device.as_ref().and_then(|device| device.retain);
    let retain = Retain::or_setting(arguments.retain, setting);
    let daemon = match is_local(&arguments.target.connect) {
        _ if retain == Retain::Off => Err("the answer would change nothing".into()),
        false => Err("the daemon of another host cannot be asked".into()),
        true => {
            let limit = reach.half_the_time() / 2;
            let answer = within(limit, reach, |reach| knows_retained_pages(&reach.socket));
            let late = || Err(format!("{} does not answer", reach.daemon()));
            answer.map_or_else(late, |answer| answer.map_err(|Failure(why, _)| why))
        }
    };
    let emulator = emulator.map(|emulator| emulator.has_retain);
    let facts = Facts { emulator, daemon };
    retain::decide(&arguments.target.domain, retain, setting, &facts)
}

/// First version of libvirt that turns ACPI off with a machine property, as 1,000,000 * major +
/// 1,000 * minor. Earlier versions use the option `-no-acpi`, which QEMU 9.0 removed.
const ACPI_PROPERTY_VERSION: u32 = 9_002_000;

/// Checks that libvirt can start the domain with a QEMU that has the device: an old libvirt cannot
/// if the domain has no ACPI, because such a QEMU has version 10.0 or newer.
fn check_acpi(domain: &tmem_libvirt::domain::Domain, libvirt: u32) -> Result<(), Failure> {
    if domain.acpi || libvirt >= ACPI_PROPERTY_VERSION {
        return Ok(());
    }
    Err(Failure(
        format!(
            "domain {} has no ACPI: this libvirt would start it with -no-acpi, which QEMU 10 does not \
             have. Add <acpi/> to <features> with virsh edit, or upgrade libvirt to 9.2",
            domain.name
        ),
        Code::Refused,
    ))
}

/// Checks that the domain's emulator has the device, because the VM would not start otherwise.
/// Returns what the emulator supports; None if the emulator is on another host or the XML names
/// none.
fn check_emulator(
    arguments: &AttachArguments,
    domain: &tmem_libvirt::domain::Domain,
    limit: Duration,
) -> Result<Option<emulator::Emulator>, Failure> {
    if !is_local(&arguments.target.connect) {
        return Ok(None);
    }
    let named = arguments.emulator.as_deref();
    let Some(emulator) = named.or(domain.emulator.as_deref()) else {
        return Ok(None);
    };
    let failure = |what: String| {
        Err(Failure(
            format!("emulator {emulator}: {what}"),
            Code::Refused,
        ))
    };
    if !Path::new(emulator).is_absolute() {
        return failure("libvirt requires an absolute path".into());
    }
    let hint = packaged::HINT;
    match emulator::ask(emulator, limit) {
        Err(error) => failure(format!("{error}: {hint}")),
        Ok(found) if found.has_device => Ok(Some(found)),
        Ok(_) => failure(format!("this QEMU has no device {DEVICE}: {hint}")),
    }
}

/// Gets or sets the quota of a libvirt domain, with options like those of virsh.
pub fn quota(
    arguments: &QuotaArguments,
    target: &Target,
    domain: &Domain,
    socket: &Path,
) -> Result<Output, Failure> {
    let active = domain
        .is_active()
        .map_err(|error| target.failure("the domain's state cannot be read", &error))?;
    if arguments.live && !active {
        return Err(Failure(
            format!("domain {} does not run: leave out --live", target.domain),
            Code::Refused,
        ));
    }
    let live = arguments.live || (active && !arguments.config);
    let config = arguments.config || !live;
    let level = |live: bool| match live {
        true => sys::VIR_DOMAIN_AFFECT_LIVE,
        false => sys::VIR_DOMAIN_AFFECT_CONFIG,
    };
    if arguments.quota.is_empty() {
        if live && config {
            let what =
                "--live and --config cannot be combined without a change: give one of them".into();
            return Err(Failure(what, Code::Usage));
        }
        let cache = noted(target, domain, level(live))??;
        let required = if cache.required { "yes" } else { "no" };
        let mut json = serde_json::json!({ "domain": target.domain, "required": cache.required });
        quota_json(&mut json, &cache);
        return Ok(Output {
            text: quota_text(&cache, arguments.bytes) + &row("required", required),
            json,
        });
    }
    // All new quotas are checked before the first one is set: one for the running VM, one for its
    // next start.
    let mut changes = Vec::new();
    for live in [true, false]
        .into_iter()
        .filter(|l| if *l { live } else { config })
    {
        // An invalid quota in the metadata is replaced, because the new values may be meant to
        // correct it.
        let mut cache = noted(target, domain, level(live))?.unwrap_or_default();
        arguments.quota.apply(&mut cache);
        let checked = cache.check();
        checked.map_err(|error| {
            Failure(format!("domain {}: {error}", target.domain), Code::Refused)
        })?;
        changes.push((level(live), cache));
    }
    let mut text = String::new();
    if live {
        let uuid = domain
            .get_uuid_string()
            .map_err(|error| target.failure("the domain's UUID cannot be read", &error))?;
        text = tell_daemon(socket, &target.domain, &uuid, &changes[0].1)?;
    }
    for (level, cache) in changes {
        domain
            .set_metadata(
                sys::VIR_DOMAIN_METADATA_ELEMENT as i32,
                Some(&cache.to_metadata()),
                Some(CACHE_PREFIX),
                Some(CACHE_NAMESPACE),
                level,
            )
            .map_err(|error| target.failure("libvirt refuses the quota", &error))?;
    }
    Ok(target.output(text))
}

/// Reads the quota from the domain's metadata. The outer error means that libvirt failed, or that
/// the metadata has no quota. The inner error means that the quota in the metadata is invalid.
fn noted(target: &Target, domain: &Domain, level: u32) -> Result<Result<Cache, Failure>, Failure> {
    let kind = sys::VIR_DOMAIN_METADATA_ELEMENT as i32;
    match domain.get_metadata(kind, Some(CACHE_NAMESPACE), level) {
        Ok(text) => Ok(Cache::parse(&text)
            .map_err(|error| Failure(format!("domain {}: {error}", target.domain), Code::Refused))),
        Err(error) if error.code() == ErrorNumber::NoDomainMetadata => Err(Failure(
            format!(
                "domain {} has no <cache> metadata: add it with tmemctl attach",
                target.domain
            ),
            Code::Refused,
        )),
        Err(error) => Err(target.failure("the domain's metadata cannot be read", &error)),
    }
}

/// Sets the running VM's quota in the daemon. Only a refusal of the quota by the daemon is an
/// error. If the daemon does not answer or does not serve the VM yet, it gets the quota later.
fn tell_daemon(socket: &Path, domain: &str, uuid: &str, cache: &Cache) -> Result<String, Failure> {
    let later = |why: String| {
        Ok(format!(
            "the domain's metadata has the quota, but it is not in effect yet: {why}\n"
        ))
    };
    let mut client = match connect_daemon(socket) {
        Ok(client) => client,
        Err(Failure(why, _)) => return later(why),
    };
    let vms = match client.list_vms().call() {
        Ok(reply) => reply.vms,
        Err(error) => return later(refused(socket, &error).0),
    };
    let Some(vm) = vms.into_iter().find(|vm| vm.uuid.as_deref() == Some(uuid)) else {
        return later(format!("the daemon has no VM with the UUID {uuid}"));
    };
    let quota = api::quota(cache.reserve, cache.limit, cache.weight);
    match client.set_quota(vm.name, quota).call() {
        Ok(_) => Ok(String::new()),
        Err(error) => match error.kind() {
            api::ErrorKind::BadQuota(Some(reason)) => Err(Failure(
                format!("domain {domain}: {}", reason.reason),
                Code::Refused,
            )),
            _ => later(refused(socket, &error).0),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_domain_without_acpi_needs_a_newer_libvirt() {
        let domain = |features: &str| {
            let xml = format!("<domain><name>web1</name><uuid>1</uuid>{features}</domain>");
            tmem_libvirt::domain::Domain::parse(&xml).expect("the XML is not valid")
        };
        let (without, with) = (
            domain("<features/>"),
            domain("<features><acpi/></features>"),
        );
        let Failure(text, code) =
            check_acpi(&without, 9_000_000).expect_err("a domain without ACPI was accepted");
        assert!(
            text.contains("web1") && text.contains("<acpi/>"),
            "the error does not name the domain and <acpi/>: {text}"
        );
        assert!(matches!(code, Code::Refused));
        assert!(check_acpi(&without, 9_002_000).is_ok());
        assert!(check_acpi(&with, 9_000_000).is_ok());
    }
}
