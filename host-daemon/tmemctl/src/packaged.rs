// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The QEMU that the package virtio-tmem-qemu installs. `tmemctl attach` gives it to a domain if
//! the user names no emulator and the domain's QEMU does not have the virtio-tmem device.

use std::path::Path;

/// Path of the QEMU that the package virtio-tmem-qemu installs. It is in /usr/bin because
/// libvirtd's AppArmor profile lets libvirtd run programs in no other directory.
pub const PATH: &str = "/usr/bin/qemu-system-x86_64-tmem";

/// Text for error messages that report a QEMU without the virtio-tmem device: it tells the user how
/// to get a QEMU with the device.
pub const HINT: &str = "install the package virtio-tmem-qemu, or select a QEMU that has the device \
                        with --emulator (qemu-dev/build --full builds one)";

/// Returns the path `packaged` if that QEMU is installed and the domain's own QEMU does not have
/// the virtio-tmem device. Returns None if the domain can keep its own QEMU.
pub fn instead_of(
    own: Option<&str>,
    packaged: &Path,
    has_device: impl Fn(&str) -> bool,
) -> Option<String> {
    let packaged = packaged.to_str().filter(|_| packaged.exists())?;
    match own {
        Some(own) if has_device(own) => None,
        _ => Some(packaged.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_packaged_qemu_replaces_a_qemu_without_the_device() {
        let directory = tempfile::tempdir().expect("cannot create a temporary directory");
        let packaged = directory.path().join("qemu-system-x86_64-tmem");
        let chosen = |own, has| instead_of(own, &packaged, |_| has);
        assert_eq!(chosen(Some("/usr/bin/qemu-system-x86_64"), false), None);
        std::fs::write(&packaged, "").expect("cannot write the file");
        let path = packaged.to_str().map(String::from);
        assert_eq!(chosen(Some("/usr/bin/qemu-system-x86_64"), false), path);
        assert_eq!(chosen(None, false), path);
        assert_eq!(chosen(Some("/opt/qemu"), true), None);
    }
}
