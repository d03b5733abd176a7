// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Finds the user who may connect to the socket of a domain's VM: the user as whom libvirt runs the
//! domain's QEMU. Out of scope: calls to libvirt.

use crate::domain::Domain;
use tmem_control::accounts::Kind;

/// Names of the user that runs QEMU for libvirt: the first on Debian and Ubuntu, the second on
/// other distributions.
const QEMU_USERS: [&str; 2] = ["libvirt-qemu", "qemu"];

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
        let Some(name) = word.or_else(|| qemu_conf_user(&conf)) else {
            let passwd = std::fs::read_to_string(PASSWD).unwrap_or_default();
            return Owner::default(&passwd, |name| Kind::User.number(name));
        };
        let source = match word {
            Some(_) => "--owner".into(),
            None => format!("user in {QEMU_CONF}"),
        };
        Owner::by_name(name, &source)
    }

    /// Returns the user that runs QEMU for libvirt if no user is configured. Packages create this user
    /// in the file /etc/passwd, whose text is `passwd`. Other sources of accounts, which may
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
            let found = look_up(name).map_err(|error| lookup_error("libvirt", name, &error))?;
            if found.is_some() {
                return Ok(Owner(found));
            }
        }
        Ok(Owner(None))
    }

    /// Returns the user that the domain's XML names for its QEMU, or `self` if the XML names none.
    pub(crate) fn for_domain(self, domain: &Domain) -> Result<Owner, String> {
        let Some(name) = &domain.user else {
            return Ok(self);
        };
        Owner::by_name(name, "<seclabel model='dac'> of the domain")
    }

    /// Returns the user `name`. `source` says where the name is configured, for messages.
    fn by_name(name: &str, source: &str) -> Result<Owner, String> {
        match Kind::User.number(name) {
            Ok(Some(number)) => Ok(Owner(Some(number))),
            Ok(None) => Err(format!(
                "{source}: the host has no user {name:?} (getent passwd): give the user that runs \
                 QEMU with --owner, by name or number"
            )),
            Err(error) => Err(lookup_error(source, name, &error)),
        }
    }
}

fn lookup_error(source: &str, name: &str, error: &std::io::Error) -> String {
    format!(
        "{source}: the user {name:?} cannot be looked up ({error}): see getent passwd and \
         /etc/nsswitch.conf, or give the user that runs QEMU with --owner, by number"
    )
}

/// Returns the user of the line `user = …` in libvirt's qemu.conf; None without such a line.
fn qemu_conf_user(conf: &str) -> Option<&str> {
    let lines = conf.lines().filter_map(|line| line.trim().split_once('='));
    let mut users = lines.filter(|(key, _)| key.trim() == "user");
    let user = users.next()?.1.trim().trim_matches('"');
    (!user.is_empty()).then_some(user)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn domain() -> Domain {
        let xml =
            "<domain><name>web</name><uuid>5ca1ab1e-0000-4000-8000-0123456789ab</uuid></domain>";
        Domain::parse(xml).expect("the domain was refused")
    }

    #[test]
    fn the_socket_owner_is_the_user_that_runs_qemu() {
        for (name, expected) in [("root", 0), ("4000012", 4_000_012), ("+13", 13)] {
            assert_eq!(Owner::by_name(name, "x"), Ok(Owner(Some(expected))));
        }
        let error =
            Owner::by_name("nobody-such", "the source").expect_err("an unknown user was accepted");
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
                qemu_conf_user(conf),
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
        let look_up = |name: &str| Ok((name == "qemu").then_some(9));
        assert_eq!(Owner::default("", look_up), Ok(Owner(Some(9))));
        assert_eq!(Owner::default("", |_| Ok(None)), Ok(Owner(None)));
    }

    #[test]
    fn a_domain_can_name_the_user_of_its_qemu() {
        let label = |label: &str| {
            let domain = Domain {
                user: Some(label.into()),
                ..domain()
            };
            Owner(Some(5)).for_domain(&domain)
        };
        assert_eq!(label("+77"), Ok(Owner(Some(77))));
        assert!(label("nobody-such").is_err_and(|what| what.contains("seclabel")));
        assert_eq!(Owner(Some(5)).for_domain(&domain()), Ok(Owner(Some(5))));
    }
}
