// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the daemon is told of a libvirt domain: the same by the hook, before a VM starts, and by
//! tmem-libvirt, while it runs.
//!
//! Never here: libvirt, and waiting.

use std::path::Path;
use tmem_control as api;
use tmem_domain::{Cache, Device, Domain};

/// Users that distributions run libvirt's QEMU as: Debian's and Ubuntu's, everybody else's.
const QEMU_USERS: [&str; 2] = ["libvirt-qemu", "qemu"];

/// The longest name of a VM, as the daemon has it.
const NAME_BYTES_MAX: usize = 64;

/// Digits of the UUID that tell labels apart.
const UUID_DIGITS: usize = 8;

/// Who may connect to a VM's socket: a user's number, None: the daemon's user only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner(pub Option<u32>);

impl Owner {
    /// A user by name or number, "none", or, without a word, whom this host's libvirt runs QEMU as.
    ///
    /// # Errors
    /// There is no such user.
    pub fn find(word: Option<&str>) -> Result<Owner, String> {
        let users = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
        Owner::among(&users, word)
    }

    fn among(users: &str, word: Option<&str>) -> Result<Owner, String> {
        let number = |name: &str| {
            let mut rows = users.lines().map(|row| row.split(':'));
            let row = rows.find_map(|mut row| (row.next() == Some(name)).then_some(row));
            row.and_then(|mut row| row.nth(1)?.parse().ok())
        };
        match word {
            None => Ok(Owner(QEMU_USERS.into_iter().find_map(number))),
            Some("none") => Ok(Owner(None)),
            Some(name) => match number(name).or_else(|| name.parse().ok()) {
                Some(number) => Ok(Owner(Some(number))),
                None => Err(format!(
                    "--owner {name}: /etc/passwd has no such user: name the user that QEMU runs as, or none"
                )),
            },
        }
    }
}

/// What a domain is called in the daemon: its name, if that can stand in a table and a metric.
pub fn label(domain: &Domain) -> String {
    let good = |c: char| c.is_ascii_alphanumeric() || "-_.:@+".contains(c);
    let name = &domain.name;
    if name.len() <= NAME_BYTES_MAX && name.chars().all(good) {
        return name.clone();
    }
    // Two names may become one.
    let room = NAME_BYTES_MAX - UUID_DIGITS - 1;
    let readable = name.chars().map(|c| if good(c) { c } else { '_' });
    let digits = domain.uuid.chars().take(UUID_DIGITS);
    let readable: String = readable.take(room).collect();
    format!("{readable}-{}", digits.collect::<String>())
}

/// A quota as the daemon takes it.
pub fn quota(cache: &Cache) -> api::Quota {
    api::quota(cache.reserve, cache.limit, cache.weight)
}

/// The VM that a domain with the device is.
pub fn vm(domain: &Domain, device: &Device, cache: &Cache, owner: Owner) -> api::VmSpec {
    api::VmSpec {
        uuid: domain.uuid.clone(),
        name: label(domain),
        socket: device.socket.clone(),
        owner: owner.0.map(i64::from),
        group: None,
        mode: None,
        trust_domain: cache.trust_domain.clone(),
        quota: quota(cache),
    }
}

/// Why the daemon did not do as it was told: true, it is there and refuses; a sentence.
pub fn refusal(socket: &Path, error: &api::Error) -> (bool, String) {
    match error.kind() {
        api::ErrorKind::BadQuota(Some(bad)) => (
            true,
            format!("the daemon refuses its quota: {}", bad.reason),
        ),
        api::ErrorKind::BadVm(Some(bad)) => {
            (true, format!("the daemon refuses it: {}", bad.reason))
        }
        _ => (false, away(socket, &error.to_string())),
    }
}

/// The daemon is not there.
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
        Domain::parse(&xml).expect("good")
    }

    #[test]
    fn labels_are_names_where_they_can_be() {
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
    fn the_owner_is_whom_qemu_runs_as() {
        let debian = "root:x:0:0:root:/root:/bin/sh\nlibvirt-qemu:x:64055:106::/:/bin/false\n";
        let fedora = "root:x:0:0::/root:/bin/sh\nqemu:x:107:107:qemu user:/:/sbin/nologin\n";
        for (users, word, expected) in [
            (debian, None, Some(64055)),
            (fedora, None, Some(107)),
            ("", None, None),
            (debian, Some("none"), None),
            (debian, Some("root"), Some(0)),
            (debian, Some("1234"), Some(1234)),
        ] {
            assert_eq!(Owner::among(users, word), Ok(Owner(expected)), "{word:?}");
        }
        let error = Owner::among(debian, Some("nobody-such")).expect_err("unknown");
        assert!(
            error.contains("nobody-such") && error.contains("--owner"),
            "{error}"
        );
    }
}
