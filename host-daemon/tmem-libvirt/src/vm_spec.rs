// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Builds the description of a domain's VM for the daemon. The hook sends it before a VM starts, and
//! the bridge while the VM runs, so both send the same description. Out of scope: calls to libvirt
//! and to the daemon.

use crate::domain::{Cache, Device, Domain};
use crate::owner::Owner;
use tmem_control as api;

/// Longest name in bytes of a VM that the daemon accepts.
const NAME_BYTES_MAX: usize = 64;

/// Number of digits of the UUID that are appended to a VM's name if the name had to be changed.
/// They make the name unique.
const UUID_DIGITS: usize = 8;

/// Number of bytes by which the memory that QEMU shares with the daemon may exceed the domain's
/// maximum memory. libvirt rounds sizes up, and QEMU may map parts of the memory at two addresses.
const MEMORY_EXTRA_BYTES: u64 = 1 << 30;

/// Returns the name that the domain's VM has in the daemon. It is the domain's name, unless that is
/// too long or has characters that tables and metrics cannot show. Such a name is shortened, the
/// characters are replaced, and digits of the UUID are appended.
fn vm_name(domain: &Domain) -> String {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || "-_.:@+".contains(c);
    let name = &domain.name;
    if name.len() <= NAME_BYTES_MAX && name.chars().all(is_allowed) {
        return name.clone();
    }
    // Different names may become equal when they are shortened and characters are replaced, so
    // digits of the UUID are appended.
    let room = NAME_BYTES_MAX - UUID_DIGITS - 1;
    let readable = name.chars().map(|c| if is_allowed(c) { c } else { '_' });
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

/// Returns the description of a domain's VM for the daemon. The user `owner` may connect to the
/// VM's socket, unless the domain's XML names another user.
///
/// # Errors
/// Returns an error if the domain names a user that does not exist.
pub fn vm_spec(
    domain: &Domain,
    device: &Device,
    cache: &Cache,
    owner: Owner,
) -> Result<api::VmSpec, String> {
    let owner = owner.for_domain(domain)?;
    let memory_max = domain.memory_max_bytes.filter(|bytes| *bytes > 0);
    let memory_max = memory_max.map(|bytes| bytes.saturating_add(MEMORY_EXTRA_BYTES));
    Ok(api::VmSpec {
        uuid: domain.uuid.clone(),
        name: vm_name(domain),
        socket: device.socket.clone(),
        owner: owner.0.map(i64::from),
        group: None,
        mode: None,
        trust_domain: cache.trust_domain.clone(),
        quota: api::quota(cache.reserve, cache.limit, cache.weight),
        memory_max_bytes: memory_max.map(|bytes| i64::try_from(bytes).unwrap_or(i64::MAX)),
    })
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
            assert_eq!(vm_name(&domain(name)), expected);
        }
    }

    #[test]
    fn memory_max_is_1_gib_above_the_maximum_memory_of_the_domain() {
        let device = Device {
            socket: "s".into(),
            ours: true,
            retain: None,
            swap: false,
        };
        let sent = |memory_max_bytes| {
            let domain = Domain {
                memory_max_bytes,
                ..domain("web")
            };
            vm_spec(&domain, &device, &Cache::default(), Owner(None))
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
}
