// SPDX-License-Identifier: Apache-2.0 OR MIT
//! User or group that the daemon's configuration names, with its numeric id.
//!
//! The daemon looks the id up once, before it enters the sandbox, in which it cannot read
//! /etc/passwd. At a reload, the daemon therefore compares names as they are written, not ids. Out
//! of scope: the users of processes that connect to a socket, see `socket/credentials.rs`.

use std::str::FromStr;
use tmem_control::accounts;

/// Path of the file that lists the host's users.
pub const USERS: &str = "/etc/passwd";
/// Path of the file that lists the host's groups.
pub const GROUPS: &str = "/etc/group";

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
    /// Returns the numeric id of the user or group; None before [`find`](Self::find) has looked it
    /// up.
    pub fn number(&self) -> Option<u32> {
        self.number
    }

    /// Looks the name up in `file`, which lists users or groups, unless the numeric id is already
    /// known.
    ///
    /// # Errors
    /// The file cannot be read or does not list the name. The error text says what to do.
    pub fn find(&mut self, file: &str) -> Result<(), String> {
        if self.number.is_some() {
            return Ok(());
        }
        let rows = std::fs::read(file);
        // Invalid UTF-8 in the file is replaced, because fields such as a user's full name may have
        // any encoding.
        let text = String::from_utf8_lossy(rows.as_deref().unwrap_or_default());
        self.number = accounts::number(&text, &self.name);
        match (self.number, &rows) {
            (Some(_), _) => Ok(()),
            (None, Ok(_)) => Err(format!(
                "the account is neither in {file} nor a number from 0 to {}: create the account, \
                 or name another",
                u32::MAX - 1
            )),
            (None, Err(error)) => Err(format!(
                "{file} cannot be read ({error}): make the file readable, or give the number of \
                 the user or group"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_a_user_or_group_is_kept_after_the_first_lookup() {
        let directory = tempfile::tempdir().expect("cannot create a temporary directory");
        let path = directory.path().join("group");
        let file = path.to_str().expect("the path is not UTF-8");
        std::fs::write(file, b"qemu:x:64055:\nb\xf6se:x:5:\nmetrics:x:990:\n")
            .expect("cannot write the file");
        let account = |name: &str| name.parse::<Account>().expect("the account name is empty");
        let mut found = account("metrics");
        assert_eq!(found.number(), None);
        found
            .find(file)
            .expect("the file does not list the account metrics");
        assert_eq!(found.number(), Some(990));
        for (name, number) in [("qemu", 64055), ("107", 107)] {
            let mut account = account(name);
            account
                .find(file)
                .expect("the file does not list the account, and its name is no number");
            assert_eq!(account.number(), Some(number));
        }
        for name in ["nobody-such", "4294967295", "-1"] {
            let Err(error) = account(name).find(file) else {
                panic!("account {name}, which the file does not list, was found");
            };
            assert!(
                error.contains(file) && error.contains("create the account"),
                "the error does not name the file and the remedy: {error}"
            );
        }

        // From here on, the file that lists the accounts does not exist. In the sandbox, the daemon
        // cannot read that file either.
        std::fs::remove_file(file).expect("cannot remove the file");
        found
            .find(file)
            .expect("the account, which was found before, is looked up again");
        assert_eq!(found, account("metrics"));
        assert_ne!(
            found,
            account("990"),
            "two accounts with the same number and different names compare as equal"
        );
        account("107")
            .find(file)
            .expect("an account that is given as a number needs the file");
        let error = account("metrics")
            .find(file)
            .expect_err("an account name was found although the file does not exist");
        assert!(
            error.contains(file) && error.contains("give the number"),
            "the error does not name the file and the remedy: {error}"
        );
        "".parse::<Account>()
            .expect_err("an empty account name was accepted");
    }
}
