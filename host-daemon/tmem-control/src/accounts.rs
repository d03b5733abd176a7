// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Finds users and groups of the host by name or number.
//!
//! The host's C library looks names up, with getpwnam_r(3) and getgrnam_r(3). It asks the sources in
//! /etc/nsswitch.conf, so users of a directory service (LDAP, Active Directory, systemd's user
//! records) are found as well. Limits: a look-up may load libraries, open sockets and wait for a
//! server, so a daemon looks names up before it enters its sandbox. A program that is linked
//! statically finds only the accounts in /etc/passwd and /etc/group.

use nix::unistd::{Group, User};
use std::io;

/// Kind of an account.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The account is a user.
    User,
    /// The account is a group.
    Group,
}

impl Kind {
    /// Name of the kind, for messages.
    pub fn name(self) -> &'static str {
        match self {
            Kind::User => "user",
            Kind::Group => "group",
        }
    }

    /// Name of the database in which getent(1) and /etc/nsswitch.conf have accounts of this kind.
    pub fn database(self) -> &'static str {
        match self {
            Kind::User => "passwd",
            Kind::Group => "group",
        }
    }

    /// Returns the number (user id or group id) of the account `name`; None if no account has that
    /// name.
    fn look_up(self, name: &str) -> nix::Result<Option<u32>> {
        match self {
            Kind::User => Ok(User::from_name(name)?.map(|user| user.uid.as_raw())),
            Kind::Group => Ok(Group::from_name(name)?.map(|group| group.gid.as_raw())),
        }
    }

    /// Returns the number (user id or group id) of the account `name`. If no account has that name,
    /// but `name` is itself a number, returns that number. Otherwise returns None. A leading `+`
    /// marks a number, as in libvirt's configuration.
    ///
    /// # Errors
    /// A source of accounts failed, for example because its server does not answer.
    pub fn number(self, name: &str) -> io::Result<Option<u32>> {
        resolve(name, |name| self.look_up(name))
    }
}

fn resolve(
    name: &str,
    look_up: impl FnOnce(&str) -> nix::Result<Option<u32>>,
) -> io::Result<Option<u32>> {
    // u32::MAX is no valid id: for chown(2) and similar calls, it means "leave unchanged".
    let valid = |number: u32| Some(number).filter(|number| *number != u32::MAX);
    let number = name.parse().ok();
    if name.is_empty() || name.starts_with('+') {
        return Ok(number.and_then(valid));
    }
    match (look_up(name), number) {
        (Ok(Some(found)), _) => Ok(valid(found)),
        // A source that fails does not make a number invalid.
        (_, Some(number)) => Ok(valid(number)),
        (Ok(None), None) => Ok(None),
        (Err(error), None) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_account_is_looked_up_by_name_before_number() {
        let look_up = |name: &str| {
            Ok(match name {
                "qemu" => Some(64055),
                "12" => Some(1012),
                "last" => Some(u32::MAX),
                _ => None,
            })
        };
        for (name, expected) in [
            ("qemu", Some(64055)),
            ("12", Some(1012)),
            ("11", Some(11)),
            ("+12", Some(12)),
            ("4294967294", Some(u32::MAX - 1)),
            ("4294967295", None),
            ("+4294967295", None),
            ("last", None),
            ("-1", None),
            ("", None),
            ("qem", None),
        ] {
            let found = resolve(name, look_up).expect("the look-up failed");
            assert_eq!(found, expected, "account {name:?} got the wrong number");
        }
    }

    #[test]
    fn a_failed_source_is_reported_except_for_numbers() {
        let fails = |_: &str| Err(nix::Error::EIO);
        resolve("qemu", fails).expect_err("a failed look-up was taken for an unknown name");
        assert_eq!(resolve("12", fails).ok(), Some(Some(12)));
    }

    #[test]
    fn accounts_of_this_host_are_found() {
        for kind in [Kind::User, Kind::Group] {
            assert_eq!(kind.number("root").ok(), Some(Some(0)));
            assert_eq!(kind.number("no-such-account").ok(), Some(None));
            assert_eq!(kind.number("bad\0name").ok(), Some(None));
        }
    }
}
