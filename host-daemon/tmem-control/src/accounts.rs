// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Finds users and groups of the host by name or number.
//!
//! The host's C library looks names up, with getpwnam_r(3) and getgrnam_r(3). It asks the sources in
//! /etc/nsswitch.conf, so users of a directory service (LDAP, Active Directory, systemd's user
//! records) are found as well. Limits: a look-up may load libraries, open sockets and wait for a
//! server, so it ends after [`LOOK_UP_MAX`], and a daemon looks names up before it enters its
//! sandbox. A program that is linked statically finds only the accounts in /etc/passwd and
//! /etc/group.

use nix::unistd::{Group, User};
use std::io;
use std::sync::mpsc;
use std::time::Duration;

/// Longest time that a look-up may take. A directory service may be in a VM of this host, which
/// starts only after the daemon.
pub const LOOK_UP_MAX: Duration = Duration::from_secs(10);

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

    /// Returns the number (user id or group id) of the account `name`, or None if the host has no
    /// such account. A name that consists of digits, also after a `+`, is the number itself and is
    /// not looked up: useradd(8) creates no such names, and a number must not wait for a server.
    ///
    /// # Errors
    /// A source of accounts failed, for example because its server does not answer.
    pub fn number(self, name: &str) -> io::Result<Option<u32>> {
        resolve(name, LOOK_UP_MAX, move |name| self.look_up(name))
    }
}

/// Returns the number that an account's name consists of, also after a `+`; None if the name is no
/// number, or a number that no account has.
pub fn number(name: &str) -> Option<u32> {
    let digits = name.strip_prefix('+').unwrap_or(name);
    let is_number = digits.bytes().all(|byte| byte.is_ascii_digit());
    digits.parse().ok().filter(|_| is_number).and_then(valid)
}

/// Returns None for u32::MAX, which is no valid id: for chown(2) and similar calls, it means "leave
/// unchanged".
fn valid(number: u32) -> Option<u32> {
    Some(number).filter(|number| *number != u32::MAX)
}

fn resolve(
    name: &str,
    time_max: Duration,
    look_up: impl FnOnce(&str) -> nix::Result<Option<u32>> + Send + 'static,
) -> io::Result<Option<u32>> {
    let digits = name.strip_prefix('+').unwrap_or(name);
    if digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Ok(number(name));
    }
    let (sender, receiver) = mpsc::channel();
    let name = name.to_string();
    std::thread::spawn(move || {
        // Sending fails if the time has passed, because the receiver no longer exists then.
        let _ = sender.send(look_up(&name));
    });
    let found = receiver.recv_timeout(time_max).map_err(|_| {
        io::Error::new(
            io::ErrorKind::TimedOut,
            format!("no answer within {} s", time_max.as_secs()),
        )
    })?;
    Ok(found?.and_then(valid))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_looked_up_and_numbers_are_not() {
        let look_up = |name: &str| {
            Ok(match name {
                "qemu" => Some(64055),
                "12" | "+12" => panic!("a number was looked up"),
                "last" => Some(u32::MAX),
                _ => None,
            })
        };
        for (name, expected) in [
            ("qemu", Some(64055)),
            ("12", Some(12)),
            ("+12", Some(12)),
            ("+", None),
            ("+qemu", None),
            ("++12", None),
            ("99999999999", None),
            ("4294967294", Some(u32::MAX - 1)),
            ("4294967295", None),
            ("+4294967295", None),
            ("last", None),
            ("-1", None),
            ("", None),
            ("qem", None),
        ] {
            let found = resolve(name, LOOK_UP_MAX, look_up).expect("the look-up failed");
            assert_eq!(found, expected, "account {name:?} got the wrong number");
        }
    }

    #[test]
    fn a_source_that_fails_or_does_not_answer_is_reported() {
        let fails = |_: &str| Err(nix::Error::EIO);
        resolve("qemu", LOOK_UP_MAX, fails)
            .expect_err("a failed look-up was taken for an unknown name");
        let (_sender, never) = mpsc::channel::<()>();
        let hangs = move |_: &str| {
            let _ = never.recv();
            Ok(None)
        };
        let error = resolve("qemu", Duration::from_millis(10), hangs)
            .expect_err("the look-up ended although its source does not answer");
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    #[test]
    fn accounts_of_this_host_are_found() {
        for kind in [Kind::User, Kind::Group] {
            assert_eq!(kind.number("root").ok(), Some(Some(0)));
            // On a machine whose directory service is away, the name gives an error.
            for unknown in ["no-such-account", "bad\0name"] {
                assert_eq!(kind.number(unknown).ok().flatten(), None);
            }
        }
    }
}
