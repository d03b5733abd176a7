// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Builds the description of a VM for the daemon from a libvirt domain. tmem-hook uses it before a
//! VM starts, and tmem-libvirt uses it while the VM runs, so both send the same description.
//!
//! Out of scope: calls to libvirt, and waiting for the daemon.

use crate::domain::{Cache, Device, Domain};
use std::path::Path;
use tmem_control as api;
use tmem_control::accounts::Kind;

/// Names of the user that runs QEMU for libvirt: the first on Debian and Ubuntu, the second on
/// other distributions.
const QEMU_USERS: [&str; 2] = ["libvirt-qemu", "qemu"];

/// Longest name in bytes of a VM that the daemon accepts.
const NAME_BYTES_MAX: usize = 64;

/// Number of digits of the UUID that are appended to a VM's name if the name had to be changed.
/// They make the name unique.
const UUID_DIGITS: usize = 8;

/// Number of bytes by which the memory that QEMU shares with the daemon may exceed the domain's
/// maximum memory. libvirt rounds sizes up, and QEMU may map parts of the memory at two addresses.
const MEMORY_EXTRA_BYTES: u64 = 1 << 30;

/// Path of the file that has the users of the host itself.
const PASSWD: &str = "/etc/passwd";

/// Path of the configuration file of libvirt's QEMU driver.
const QEMU_CONF: &str = "/etc/libvirt/qemu.conf";

/// User id of the user who may connect to a VM's socket. None allows only the daemon's own user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner(pub Option<u32>);

impl Owner {
    /// Finds the user whose name or number is `word`. The word "none" means no user. If `word` is
    /// None, the result is the user that runs QEMU for libvirt on this host.
    ///
    /// # Errors
    /// The user does not exist, or a source of accounts failed.
    pub fn find(word: Option<&str>) -> Result<Owner, String> {
        let conf = std::fs::read_to_string(QEMU_CONF).unwrap_or_default();
        if word == Some("none") {
            return Ok(Owner(None));
        }
        let Some(name) = word.or_else(|| configured(&conf)) else {
            let passwd = std::fs::read_to_string(PASSWD).unwrap_or_default();
            return Owner::default(&passwd, |name| Kind::User.number(name));
        };
        let source = match word {
            Some(_) => "--owner".into(),
            None => format!("user in {QEMU_CONF}"),
        };
        Owner::named(name, &source)
    }

    /// Returns the user that runs QEMU for libvirt if nothing is configured. Packages create this
    /// user in the file /etc/passwd, whose text is `passwd`. Other sources of accounts, which may
    /// have to wait for a server, are asked with `look_up` only if the file has no such user.
    ///
    /// # Errors
    /// The file has no such user, and a source of accounts failed.
    fn default(
        passwd: &str,
        look_up: impl Fn(&str) -> std::io::Result<Option<u32>>,
    ) -> Result<Owner, String> {
        let user_id = |name: &str| {
            let mut fields = passwd.lines().map(|line| line.split(':'));
            let mut user = fields.find_map(|mut line| (line.next()? == name).then_some(line))?;
            user.nth(1)?.parse().ok()
        };
        if let Some(number) = QEMU_USERS.into_iter().find_map(user_id) {
            return Ok(Owner(Some(number)));
        }
        for name in QEMU_USERS {
            let found = look_up(name).map_err(|error| not_looked_up("libvirt", name, &error))?;
            if found.is_some() {
                return Ok(Owner(found));
            }
        }
        Ok(Owner(None))
    }

    /// Returns the user that the domain's XML names for its QEMU, or `self` if the XML names none.
    fn of(self, domain: &Domain) -> Result<Owner, String> {
        let Some(name) = &domain.user else {
            return Ok(self);
        };
        Owner::named(name, "<seclabel model='dac'> of the domain")
    }

    fn named(name: &str, source: &str) -> Result<Owner, String> {
        match Kind::User.number(name) {
            Ok(Some(number)) => Ok(Owner(Some(number))),
            Ok(None) => Err(format!(
                "{source}: the host has no user {name:?} (getent passwd): give the user that runs \
                 QEMU with --owner, by name or number"
            )),
            Err(error) => Err(not_looked_up(source, name, &error)),
        }
    }
}

fn not_looked_up(source: &str, name: &str, error: &std::io::Error) -> String {
    format!(
        "{source}: the user {name:?} cannot be looked up ({error}): see getent passwd and \
         /etc/nsswitch.conf, or give the user that runs QEMU with --owner, by number"
    )
}

/// Returns the user of the line `user = …` in libvirt's qemu.conf; None without such a line.
fn configured(conf: &str) -> Option<&str> {
    let lines = conf.lines().filter_map(|line| line.trim().split_once('='));
    let mut users = lines.filter(|(key, _)| key.trim() == "user");
    let user = users.next()?.1.trim().trim_matches('"');
    (!user.is_empty()).then_some(user)
}

/// Returns the name that the domain's VM has in the daemon. It is the domain's name, unless that is
/// too long or has characters that tables and metrics cannot show. Such a name is shortened, the
/// characters are replaced, and digits of the UUID are appended.
pub fn label(domain: &Domain) -> String {
    let good = |c: char| c.is_ascii_alphanumeric() || "-_.:@+".contains(c);
    let name = &domain.name;
    if name.len() <= NAME_BYTES_MAX && name.chars().all(good) {
        return name.clone();
    }
    // Different names may become equal when they are shortened and characters are replaced, so
    // digits of the UUID are appended.
    let room = NAME_BYTES_MAX - UUID_DIGITS - 1;
    let readable = name.chars().map(|c| if good(c) { c } else { '_' });
    let digits = domain.uuid.chars().take(UUID_DIGITS);
    let readable: String = readable.take(room).collect();
    format!("{readable}-{}", digits.collect::<String>())
}

/// Returns the path of a VM's second socket, in the directory of its first one. The target of a
/// migration on one host uses the second socket. If `socket` is the second one, returns the first
/// one. A VM that migrates repeatedly thus alternates between two sockets.
pub fn other_socket(socket: &str, uuid: &str) -> String {
    let directory = socket
        .rsplit_once('/')
        .map_or("", |(directory, _)| directory);
    let first = format!("{directory}/{uuid}.sock");
    if socket == first {
        format!("{directory}/{uuid}-b.sock")
    } else {
        first
    }
}

/// Converts the quota of a domain to the type that the control socket uses.
pub fn quota(cache: &Cache) -> api::Quota {
    api::quota(cache.reserve, cache.limit, cache.weight)
}

/// Returns the description of a domain's VM for the daemon. The user `owner` may connect to the
/// VM's socket, unless the domain's XML names another user.
///
/// # Errors
/// Returns an error if the domain names a user that does not exist.
pub fn vm(
    domain: &Domain,
    device: &Device,
    cache: &Cache,
    owner: Owner,
) -> Result<api::VmSpec, String> {
    let owner = owner.of(domain)?;
    let memory_max = domain.memory_max_bytes.filter(|bytes| *bytes > 0);
    let memory_max = memory_max.map(|bytes| bytes.saturating_add(MEMORY_EXTRA_BYTES));
    Ok(api::VmSpec {
        uuid: domain.uuid.clone(),
        name: label(domain),
        socket: device.socket.clone(),
        owner: owner.0.map(i64::from),
        group: None,
        mode: None,
        trust_domain: cache.trust_domain.clone(),
        quota: quota(cache),
        memory_max_bytes: memory_max.map(|bytes| i64::try_from(bytes).unwrap_or(i64::MAX)),
    })
}

/// Returns the reason why a request to the daemon failed. The flag is true if the daemon refused
/// the VM or its quota. It is false if the daemon gave no answer or another error.
pub fn refusal(socket: &Path, error: &api::Error) -> (bool, String) {
    match error.kind() {
        api::ErrorKind::BadQuota(Some(bad)) => (
            true,
            format!("the daemon refuses the VM's quota: {}", bad.reason),
        ),
        api::ErrorKind::BadVm(Some(bad)) => {
            (true, format!("the daemon refuses the VM: {}", bad.reason))
        }
        _ => (false, away(socket, &error.to_string())),
    }
}

/// Returns the message for a daemon that does not answer at its control socket.
pub fn away(socket: &Path, why: &str) -> String {
    format!(
        "the daemon's control socket {} does not answer: {why}",
        socket.display()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn domain(name: &str) -> Domain {
        let xml = format!(
            "<domain><name>{name}</name><uuid>5CA1AB1E-0000-4000-8000-0123456789ab</uuid></domain>"
        );
        Domain::parse(&xml).expect("the domain was refused")
    }

    #[test]
    fn vm_name_is_the_domain_name_unless_invalid_or_too_long() {
        let long = "x".repeat(65);
        let cut = format!("{}-5ca1ab1e", "x".repeat(55));
        for (name, expected) in [
            ("web-1.example", "web-1.example"),
            ("web 1", "web_1-5ca1ab1e"),
            ("é,=", "___-5ca1ab1e"),
            (&long[..64], &long[..64]),
            (&long, &cut),
        ] {
            assert_eq!(label(&domain(name)), expected);
        }
    }

    #[test]
    fn the_daemon_gets_the_maximum_memory_of_the_domain() {
        let device = Device {
            socket: "s".into(),
            ours: true,
            retain: None,
        };
        let sent = |memory_max_bytes| {
            let domain = Domain {
                memory_max_bytes,
                ..domain("web")
            };
            vm(&domain, &device, &Cache::default(), Owner(None))
                .expect("the domain was refused")
                .memory_max_bytes
        };
        assert_eq!(sent(Some(8 << 30)), Some(9 << 30));
        assert_eq!(sent(Some(i64::MAX as u64)), Some(i64::MAX));
        assert_eq!((sent(None), sent(Some(0))), (None, None));
    }

    #[test]
    fn successive_migrations_alternate_between_two_sockets() {
        assert_eq!(other_socket("/run/x/u.sock", "u"), "/run/x/u-b.sock");
        assert_eq!(other_socket("/run/x/u-b.sock", "u"), "/run/x/u.sock");
        assert_eq!(other_socket("/run/x/web.sock", "u"), "/run/x/u.sock");
    }

    #[test]
    fn the_socket_owner_is_the_user_that_runs_qemu() {
        for (name, expected) in [("root", 0), ("4000012", 4_000_012), ("+13", 13)] {
            assert_eq!(Owner::named(name, "x"), Ok(Owner(Some(expected))));
        }
        let error =
            Owner::named("nobody-such", "the source").expect_err("an unknown user was accepted");
        for part in ["nobody-such", "the source", "--owner"] {
            assert!(
                error.contains(part),
                "the error does not contain {part:?}: {error}"
            );
        }
        for (conf, expected) in [
            ("# user = \"qemu\"\ngroup = \"kvm\"\n", None),
            ("user = \"root\"\n", Some("root")),
            ("  user=\"+0\"", Some("+0")),
            ("user = \"\"", None),
            ("users = \"a\"\n#user = \"b\"\nuser = 5\n", Some("5")),
        ] {
            assert_eq!(
                configured(conf),
                expected,
                "the configuration {conf:?} was parsed to the wrong values"
            );
        }
        assert_eq!(Owner::find(Some("none")), Ok(Owner(None)));
    }

    #[test]
    fn the_default_user_of_qemu_is_looked_up_in_passwd_first() {
        let away = |_: &str| Err(std::io::Error::other("the server is away"));
        let passwd = "root:x:0:0:root:/root:/bin/sh\nqemu:x:107:107:qemu:/:/sbin/nologin\n";
        assert_eq!(Owner::default(passwd, away), Ok(Owner(Some(107))));
        let passwd = "qemus:x:7:7::/:\n:qemu:8\nqemu\nqemu:x\n";
        let error = Owner::default(passwd, away).expect_err("a failed look-up was ignored");
        assert!(error.contains("the server is away") && error.contains("libvirt-qemu"));
        let one = |name: &str| Ok((name == "qemu").then_some(9));
        assert_eq!(Owner::default("", one), Ok(Owner(Some(9))));
        assert_eq!(Owner::default("", |_| Ok(None)), Ok(Owner(None)));
    }

    #[test]
    fn a_domain_can_name_the_user_of_its_qemu() {
        let label = |label: &str| {
            let domain = Domain {
                user: Some(label.into()),
                ..domain("web")
            };
            Owner(Some(5)).of(&domain)
        };
        assert_eq!(label("+77"), Ok(Owner(Some(77))));
        assert!(label("nobody-such").is_err_and(|what| what.contains("seclabel")));
        assert_eq!(Owner(Some(5)).of(&domain("web")), Ok(Owner(Some(5))));
    }
}
