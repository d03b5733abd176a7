// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A user or group that the configuration names, and its number.
//!
//! The number is looked up once, before the sandbox is entered, in which nothing reads /etc/passwd any more. A
//! configuration that is read again is therefore compared by what is written. Never here: whoever connects.

use std::str::FromStr;
use tmem_control::accounts;

/// Where users are.
pub const USERS: &str = "/etc/passwd";
/// Where groups are.
pub const GROUPS: &str = "/etc/group";

/// A user or a group. Those that are written alike are equal.
#[derive(Clone, Debug, Eq)]
pub struct Account {
    /// As it is written: its name, or its number.
    pub name: String,
    /// None until it is looked up.
    number: Option<u32>,
}

impl PartialEq for Account {
    fn eq(&self, other: &Account) -> bool {
        self.name == other.name
    }
}

impl FromStr for Account {
    type Err = String;

    /// Looks nothing up.
    fn from_str(name: &str) -> Result<Account, String> {
        match name {
            "" => Err("is empty".into()),
            _ => Ok(Account {
                name: name.into(),
                number: None,
            }),
        }
    }
}

impl Account {
    /// Its number, once it was [looked up](Self::find).
    pub fn number(&self) -> Option<u32> {
        self.number
    }

    /// Looks it up in that file, if it was not yet.
    ///
    /// # Errors
    /// It is not there; what to do.
    pub fn find(&mut self, file: &str) -> Result<(), String> {
        if self.number.is_some() {
            return Ok(());
        }
        let rows = std::fs::read(file);
        // People's names in it may be in any encoding.
        let text = String::from_utf8_lossy(rows.as_deref().unwrap_or_default());
        self.number = accounts::number(&text, &self.name);
        match (self.number, &rows) {
            (Some(_), _) => Ok(()),
            (None, Ok(_)) => Err(format!(
                "it is neither in {file} nor a number from 0 to {}: create it, or name another",
                u32::MAX - 1
            )),
            (None, Err(error)) => Err(format!(
                "{file} cannot be read ({error}): mend that, or give its number"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_looked_up_once() {
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

        // As in the sandbox.
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
