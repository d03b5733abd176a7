// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Finds users and groups by name or number in the texts of /etc/passwd and /etc/group.

/// Returns the number (user id or group id) of a user or group. `rows` is the text of /etc/passwd
/// or /etc/group. If no row has the name `name`, but `name` is itself a number, returns that
/// number. Otherwise returns None.
pub fn number(rows: &str, name: &str) -> Option<u32> {
    let mut rows = rows.lines().map(|row| row.split(':'));
    let row = rows.find_map(|mut row| (row.next() == Some(name)).then_some(row));
    // `parse()` accepts a leading `+`, which libvirt writes before a user id.
    let number = row.map_or(Some(name), |mut row| row.nth(1));
    // u32::MAX is no valid id: for chown(2) and similar calls, it means "leave unchanged".
    let number = number?.parse().ok();
    number.filter(|number| *number != u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::number;

    #[test]
    fn an_account_is_looked_up_by_name_before_number() {
        let users = "root:x:0:0:root:/root:/bin/sh\nlibvirt-qemu:x:64055:106::/:/bin/false\n\
                     12:x:1012:12::/:\nodd:x:many:1::/:\nshort:x\nlast:x:4294967295:1::/:\n";
        for (name, expected) in [
            ("root", Some(0)),
            ("libvirt-qemu", Some(64055)),
            ("12", Some(1012)),
            ("11", Some(11)),
            ("+13", Some(13)),
            ("4294967294", Some(u32::MAX - 1)),
            ("4294967295", None),
            ("last", None),
            ("-1", None),
            ("", None),
            ("qemu", None),
            ("libvirt", None),
            ("root:x", None),
            ("odd", None),
            ("short", None),
        ] {
            assert_eq!(
                number(users, name),
                expected,
                "account {name:?} was resolved to the wrong user ID"
            );
        }
        let groups = "root:x:0:\nkvm:x:36:alice,bob\n";
        assert_eq!(number(groups, "kvm"), Some(36));
        assert_eq!(number(groups, "alice"), None);
    }
}
