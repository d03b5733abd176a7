// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A user or group that the configuration names, and its number.
//!
//! The number is looked up once, before the sandbox is entered, because /etc/passwd cannot be read
//! in the sandbox. A reloaded configuration is therefore compared by the written names. Out of
//! scope: the users of peers, see `socket/credentials.rs`.

use std::str::FromStr;
use tmem_control::accounts;

/// The file of users.
pub const USERS: &str = "/etc/passwd";
/// The file of groups.
pub const GROUPS: &str = "/etc/group";

/// A user or a group. Two values are equal if they are written alike.
#[derive(Clone, Debug, Eq, serde::Deserialize)]
#[serde(try_from = "String")]
pub struct Account {
    /// The name or number as it is written.
    pub name: String,
    /// The number; None until it is looked up.
    number: Option<u32>,
}

impl PartialEq for Account {
    fn eq(&self, other: &Account) -> bool {
        self.name == other.name
    }
}

impl FromStr for Account {
    type Err = String;

    /// Parses a name without looking it up.
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
    /// Returns the number, once it was [looked up](Self::find).
    pub fn number(&self) -> Option<u32> {
        self.number
    }

    /// Looks the name up in a file, unless that was done before.
    ///
    /// # Errors
    /// The name is not there; the text says what to do.
    pub fn find(&mut self, file: &str) -> Result<(), String> {
        if self.number.is_some() {
            return Ok(());
        }
        let rows = std::fs::read(file);
        // Other fields may be in any encoding.
        let text = String::from_utf8_lossy(rows.as_deref().unwrap_or_default());
        self.number = accounts::number(&text, &self.name);
        match (self.number, &rows) {
            (Some(_), _) => Ok(()),
            (None, Ok(_)) => Err(format!(
                "it is neither in {file} nor a number from 0 to {}: create it, or name another",
                u32::MAX - 1
            )),
            (None, Err(error)) => Err(format!(
                "{file} cannot be read ({error}): fix that, or give its number"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_account_is_looked_up_once() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("group");
        let file = path.to_str().expect("a name");
        std::fs::write(file, b"qemu:x:64055:\nb\xf6se:x:5:\nmetrics:x:990:\n").expect("written");
        let account = |name: &str| name.parse::<Account>().expect("a name");
        let mut found = account("metrics");
        assert_eq!(found.number(), None);
        found.find(file).expect("it is there");
        assert_eq!(found.number(), Some(990));
        for (name, number) in [("qemu", 64055), ("107", 107)] {
            let mut account = account(name);
            account.find(file).expect("it is there");
            assert_eq!(account.number(), Some(number));
        }
        for name in ["nobody-such", "4294967295", "-1"] {
            let error = account(name).find(file).expect_err(name);
            assert!(
                error.contains(file) && error.contains("create it"),
                "{error}"
            );
        }

        // As in the sandbox, the file cannot be read.
        std::fs::remove_file(file).expect("there");
        found.find(file).expect("it is known");
        assert_eq!(found, account("metrics"));
        assert_ne!(found, account("990"), "what is written differs");
        account("107").find(file).expect("a number needs no file");
        let error = account("metrics").find(file).expect_err("no file");
        assert!(
            error.contains(file) && error.contains("its number"),
            "{error}"
        );
        "".parse::<Account>().expect_err("nobody");
    }
}
