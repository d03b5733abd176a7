// SPDX-License-Identifier: Apache-2.0 OR MIT
//! VM store: files that describe the added VMs, from which the next start of the daemon restores
//! the VMs. Each VM has a file in `vms/` of the run directory, named after its socket.
//!
//! Each file is written atomically. A file that cannot be parsed is reported and kept. Out of
//! scope: pages of VMs, and data from guests.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use tmem_control::VmSpec;

/// Maximum size of a VM's file in bytes. A valid file has a few hundred bytes.
const FILE_BYTES_MAX: u64 = 64 << 10;

/// Suffix of the name of a stored VM's file.
const SUFFIX: &str = ".json";

/// VM store, which is the directory with the files of the stored VMs.
pub struct VmStore(PathBuf);

/// A file of the VM store, and the VM that the file describes.
pub struct StoredVm {
    /// Path of the VM's file.
    pub path: PathBuf,
    /// The stored VM or, if the file is invalid, the reason why it is.
    pub vm: Result<VmSpec, String>,
}

impl VmStore {
    /// Creates the VM store of a run directory. The store's directory is created when a VM is
    /// stored.
    pub fn new(run_directory: &Path) -> VmStore {
        VmStore(run_directory.join("vms"))
    }

    /// Returns the path of the file for the VM with the given socket; None if the path of the
    /// socket has no file name.
    fn path(&self, socket: &Path) -> Option<PathBuf> {
        let mut name = socket.file_name()?.to_os_string();
        name.push(SUFFIX);
        Some(self.0.join(name))
    }

    /// Checks that only the daemon's user can write to the store's directory. Another user with
    /// write permission could choose which VMs exist, the trust domain of each VM, and which files
    /// the daemon overwrites. If other users can write to the run directory, one of them may have
    /// created the store's directory.
    fn check(&self) -> io::Result<()> {
        let is = fs::symlink_metadata(&self.0)?;
        let me = rustix::process::geteuid().as_raw();
        if is.is_dir() && is.uid() == me && is.mode() & 0o022 == 0 {
            return Ok(());
        }
        Err(io::Error::other(format!(
            "it must be a directory of user {me} that no other user can write to: remove it, or \
             choose another --run-directory"
        )))
    }

    fn at<T>(path: &Path, result: io::Result<T>) -> io::Result<T> {
        result.map_err(|e| io::Error::new(e.kind(), format!("VM store: {}: {e}", path.display())))
    }

    /// Reads all stored VMs in the order of their files' names.
    ///
    /// # Errors
    /// The store's directory exists but cannot be read.
    pub fn read(&self) -> io::Result<Vec<StoredVm>> {
        let directory = match self.check().and_then(|()| fs::read_dir(&self.0)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            directory => VmStore::at(&self.0, directory)?,
        };
        let mut store = Vec::new();
        for entry in directory {
            let path = VmStore::at(&self.0, entry)?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            // Files without the suffix are left over from an interrupted write.
            if let Some(socket) = name.strip_suffix(SUFFIX) {
                store.push(StoredVm {
                    vm: read(&path, socket),
                    path,
                });
            }
        }
        store.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(store)
    }

    /// Stores a VM. Replaces a stored VM that has the same socket.
    ///
    /// # Errors
    /// The file cannot be written. In this case, the VM's earlier file stays.
    pub fn write(&self, vm: &VmSpec) -> io::Result<()> {
        let made = DirBuilder::new().mode(0o700).create(&self.0);
        match made {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            made => VmStore::at(&self.0, made)?,
        }
        VmStore::at(&self.0, self.check())?;
        let path = self.path(Path::new(&vm.socket));
        let path =
            path.ok_or_else(|| io::Error::other("the path of the VM's socket has no file name"))?;
        let new = path.with_extension("new");
        let write = || {
            let text = serde_json::to_string_pretty(vm).map_err(io::Error::other)?;
            let mut options = OpenOptions::new();
            options.write(true).create(true).truncate(true).mode(0o600);
            let mut file = options.open(&new)?;
            file.write_all(text.as_bytes())?;
            // The content must be on the disk before the file gets its final name. Otherwise a
            // power failure could leave an incomplete file with that name.
            file.sync_all()?;
            fs::rename(&new, &path)
        };
        VmStore::at(&path, write())
    }

    /// Removes the stored VM that has the given socket, if there is one.
    ///
    /// # Errors
    /// The VM's file exists and cannot be removed.
    pub fn remove(&self, socket: &Path) -> io::Result<()> {
        let Some(path) = self.path(socket) else {
            return Ok(());
        };
        match self.check().and_then(|()| fs::remove_file(&path)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => VmStore::at(&path, removed),
        }
    }
}

fn read(path: &Path, socket: &str) -> Result<VmSpec, String> {
    let mut text = String::new();
    let file = File::open(path).map_err(|e| e.to_string())?;
    let read = file.take(FILE_BYTES_MAX).read_to_string(&mut text);
    read.map_err(|e| e.to_string())?;
    let vm: VmSpec = serde_json::from_str(&text).map_err(|e| e.to_string())?;
    if Path::new(&vm.socket).file_name() != Some(socket.as_ref()) {
        return Err(format!(
            "the file describes the VM at another socket, {}",
            vm.socket
        ));
    }
    Ok(vm)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    const UUID: &str = "5ca1ab1e-0000-4000-8000-0123456789ab";
    const SOCKET: &str = "/run/virtio-tmem/a.sock";

    fn vm(name: &str) -> VmSpec {
        VmSpec {
            uuid: UUID.into(),
            name: name.into(),
            socket: SOCKET.into(),
            owner: Some(107),
            group: None,
            mode: None,
            memory_max_bytes: None,
            trust_domain: Some("team".into()),
            quota: tmem_control::quota(Some(1), None, None),
        }
    }

    #[test]
    fn a_stored_vm_is_read_until_it_is_removed() {
        let directory = tempfile::tempdir().expect("cannot create a temporary directory");
        let store = VmStore::new(directory.path());
        store
            .remove(Path::new(SOCKET))
            .expect("removing a VM that is not stored failed");
        assert!(
            store
                .read()
                .expect("reading a missing store failed")
                .is_empty()
        );
        store.write(&vm("a")).expect("cannot write the VM");
        store.write(&vm("b")).expect("cannot replace the VM");
        let read = store.read().expect("cannot read the store");
        assert_eq!(
            read.len(),
            1,
            "the store does not contain exactly one VM, or it contains a temporary file"
        );
        assert_eq!(read[0].vm, Ok(vm("b")));
        let mode = |path: &Path| {
            let metadata = fs::metadata(path).expect("cannot read the file's attributes");
            metadata.permissions().mode() & 0o777
        };
        assert_eq!(mode(&read[0].path), 0o600);
        assert_eq!(mode(&directory.path().join("vms")), 0o700);
        store
            .remove(Path::new(SOCKET))
            .expect("cannot remove the VM");
        assert!(store.read().expect("cannot read the store").is_empty());
    }

    /// The daemon does not read, write or remove files in a directory to which another user can
    /// write.
    #[test]
    fn a_vm_store_that_other_users_can_write_to_is_refused() {
        let there = tempfile::tempdir().expect("cannot create a temporary directory");
        let store = VmStore::new(there.path());
        store.write(&vm("a")).expect("cannot write the VM");
        let vms = there.path().join("vms");
        let stored = vms.join("a.sock.json");
        let before = fs::read(&stored).expect("cannot read the file");
        let refused = |store: &VmStore, why: &str| {
            let read = store.read().map(drop);
            for result in [read, store.write(&vm("b")), store.remove(Path::new(SOCKET))] {
                let Err(error) = result else {
                    panic!("the store was used although {why}");
                };
                let error = error.to_string();
                assert!(
                    error.contains("no other user can write"),
                    "{why}: the error does not say that no other user may write: {error}"
                );
            }
            assert_eq!(
                fs::read(&stored).expect("cannot read the file"),
                before,
                "{why}: the stored VM was changed"
            );
        };

        let here = tempfile::tempdir().expect("cannot create a temporary directory");
        std::os::unix::fs::symlink(&vms, here.path().join("vms"))
            .expect("cannot create the symbolic link");
        refused(
            &VmStore::new(here.path()),
            "the directory is a symbolic link",
        );
        for mode in [0o770, 0o702] {
            fs::set_permissions(&vms, fs::Permissions::from_mode(mode))
                .expect("cannot change the file's mode");
            refused(&store, "other users can write to the directory");
        }
        fs::set_permissions(&vms, fs::Permissions::from_mode(0o755))
            .expect("cannot change the file's mode");
        assert_eq!(
            store
                .read()
                .expect("a directory that other users can only read was refused")
                .len(),
            1
        );
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&vms, Some(1), None)
                .expect("cannot change the directory's owner");
            refused(&store, "the directory belongs to another user");
        }
    }

    #[test]
    fn invalid_files_in_the_vm_store_are_reported() {
        let directory = tempfile::tempdir().expect("cannot create a temporary directory");
        let store = VmStore::new(directory.path());
        store.write(&vm("a")).expect("cannot write the VM");
        let path = |name: &str| directory.path().join("vms").join(name);
        fs::write(path("b.json"), "{").expect("cannot write the file");
        fs::copy(path("a.sock.json"), path("c.json")).expect("cannot copy the file");
        fs::write(path("d.json"), vec![b' '; 1 << 20]).expect("cannot write the file");
        fs::write(path("e.new"), "{").expect("cannot write the file");
        let read = store.read().expect("cannot read the store");
        assert_eq!(read.len(), 4);
        assert_eq!(read[0].vm, Ok(vm("a")));
        assert!(read[1..].iter().all(|stored| stored.vm.is_err()));
        assert!(read[2].vm.as_ref().is_err_and(|what| what.contains(SOCKET)));
        assert!(read[2].path.ends_with("vms/c.json"));
    }
}
