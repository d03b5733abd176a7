// SPDX-License-Identifier: Apache-2.0 OR MIT
//! User or group that the daemon's configuration names, with its numeric id.
//!
//! The daemon looks the id up once, before it enters the sandbox, in which it cannot ask the host's
//! sources of accounts. At a reload, the daemon therefore compares names as they are written, not
//! ids. Out of scope: the users of processes that connect to a socket, see `socket/credentials.rs`.

use std::str::FromStr;
use tmem_control::accounts::{self, Kind};

/// User or group in the configuration. Two accounts are equal if their names are equal; their ids
/// are not compared.
#[derive(Clone, Debug, Eq, serde::Deserialize)]
#[serde(try_from = "String")]
pub struct Account {
    /// Name or numeric id, as the configuration writes it.
    pub name: String,
    /// Numeric id of the user or group; None until [`find`](Self::find) has looked it up.
    number: Option<u32>,
}

impl PartialEq for Account {
    fn eq(&self, other: &Account) -> bool {
        self.name == other.name
    }
}

impl FromStr for Account {
    type Err = String;

    /// Parses the name or numeric id of an account. Does not look the name up in a file.
    fn from_str(name: &str) -> Result<Account, String> {
        match name {
            "" => Err("is empty: write a name or a number".into()),
            _ => Ok(Account {
                name: name.into(),
                number: None,
            }),
        }
    }
}

impl TryFrom<String> for Account {
    type Error = String;

    fn try_from(name: String) -> Result<Account, String> {
        name.parse()
    }
}

impl Account {
    /// Returns the numeric id of the user or group; None until [`find`](Self::find) or
    /// [`find_in`](Self::find_in) has determined it.
    pub fn number(&self) -> Option<u32> {
        self.number
    }

    /// Finds the number of the account without a look-up: the name is a number, or one of the
    /// `known` accounts has the name. Returns false if the number is still unknown.
    pub fn find_in<'a>(&mut self, mut known: impl Iterator<Item = &'a Account>) -> bool {
        self.number =
            accounts::number(&self.name).or_else(|| known.find(|other| *other == self)?.number);
        self.number.is_some()
    }

    /// Looks up the number of the user or group, unless it is already known.
    ///
    /// # Errors
    /// The host has no such account, or a source of accounts failed. The error text says what to do.
    pub fn find(&mut self, kind: Kind) -> Result<(), String> {
        if self.number.is_some() {
            return Ok(());
        }
        let (what, database) = (kind.name(), kind.database());
        self.number = kind.number(&self.name).map_err(|error| {
            format!(
                "the {what} cannot be looked up ({error}): see `getent {database} {}` and \
                 /etc/nsswitch.conf, or give the number of the {what}",
                self.name
            )
        })?;
        match self.number {
            Some(_) => Ok(()),
            None => Err(format!(
                "the account is neither a {what} of this host (`getent {database} {}`) nor a number \
                 from 0 to {}: create the account, or name another",
                self.name,
                u32::MAX - 1
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_a_user_or_group_is_kept_after_the_first_lookup() {
        let account = |name: &str| name.parse::<Account>().expect("the account name is empty");
        let mut found = account("root");
        assert_eq!(found.number(), None);
        found.find(Kind::Group).expect("the host has no group root");
        assert_eq!(found.number(), Some(0));
        for name in ["nobody-such", "4294967295", "-1"] {
            let Err(error) = account(name).find(Kind::User) else {
                panic!("account {name}, which the host does not have, was found");
            };
            for part in ["getent passwd", name, "create the account"] {
                assert!(error.contains(part), "the error lacks {part:?}: {error}");
            }
        }
        // In the sandbox, no look-up is possible. An account that was found is not looked up again.
        let mut known = Account {
            name: "nobody-such".into(),
            number: Some(5),
        };
        known
            .find(Kind::User)
            .expect("the account, which was found before, is looked up again");
        assert_eq!(known.number(), Some(5));
        assert_eq!(found, account("root"));
        assert_ne!(
            found,
            account("0"),
            "two accounts with the same number and different names compare as equal"
        );
        "".parse::<Account>()
            .expect_err("an empty account name was accepted");
    }
}
