// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Decides which files may back guest memory: those that no other user can truncate, and whose
//! pages the kernel provides without waiting for another process.
//!
//! An access to a page that was truncated ends the connection of the VM ([`crate::memory::sigbus`]).
//! So the daemon accepts a file that only the VMM's own user can truncate. An access to a file of
//! any other file system than tmpfs and hugetlbfs could wait for a disk, a server or a process (FUSE)
//! and would block the worker thread, and thereby other VMs. Limits: the owner may change the mode
//! later, and a process that opened the file for writing before keeps its descriptor. Out of scope:
//! where in the file the memory is, see `table.rs`.

use rustix::fs::SealFlags;
use std::fs::File;
use std::os::fd::AsRawFd;

/// Permission bits that let the group or other users write to a file, and thereby truncate it. If
/// the file has an access control list, the bits of the group are the most that the list grants.
const WRITABLE_BY_OTHERS: u32 = 0o022;

/// Remedy for memory that is refused.
const REMEDY: &str = "give it memory of memory-backend-memfd,share=on (libvirt: \
                      <memoryBacking><source type='memfd'/><access mode='shared'/>)";

/// Checks that no process of another user than `vmm_user`, the user of the VMM, can truncate a file
/// that backs guest memory, and that an access to its pages waits for no other process. A file that
/// is sealed against shrinking is always accepted. If `vmm_user` is None, no other file is.
///
/// # Errors
/// The file does not meet these conditions. The error text says what to do.
pub fn check(file: &File, vmm_user: Option<u32>) -> Result<(), String> {
    // Only files of tmpfs and hugetlbfs have seals, and reading the seals is the only call that is
    // made before the file system is known. Others, such as fstatfs(2), could wait for the process
    // that serves the file system.
    let seals = rustix::fs::fcntl_get_seals(file).map_err(|_| {
        format!(
            "is in the file {}, which is neither on tmpfs nor on hugetlbfs. An access to it could \
             wait for a disk or for another process, or it is memory that no other process may map \
             (guest_memfd, memfd_secret): {REMEDY}",
            path(file)
        )
    })?;
    if seals.contains(SealFlags::SHRINK) {
        return Ok(());
    }
    let could = "could truncate (no F_SEAL_SHRINK), which would end the VM's connection";
    let Some(vmm_user) = vmm_user else {
        return Err(format!(
            "is in a file that another process {could}: {REMEDY}"
        ));
    };
    let stat = rustix::fs::fstat(file).map_err(|error| format!("is in a file: {error}"))?;
    let (owner, mode) = (stat.st_uid, stat.st_mode & 0o7777);
    if owner != 0 && owner != vmm_user {
        return Err(format!(
            "is in the file {}, which its owner {could}. The owner is user {owner}, but the VMM is \
             user {vmm_user}: make the VMM's user the owner of the file, or {REMEDY}",
            path(file)
        ));
    }
    if mode & WRITABLE_BY_OTHERS != 0 {
        return Err(format!(
            "is in the file {}, which other users {could}. Its mode is {mode:03o}: take the \
             permission to write from group and others, or {REMEDY}",
            path(file)
        ));
    }
    Ok(())
}

/// Returns the path of a file for messages. The kernel reports it without asking the file system. The
/// front end may have chosen it, so control characters are escaped.
fn path(file: &File) -> String {
    let link = format!("/proc/self/fd/{}", file.as_raw_fd());
    match std::fs::read_link(link) {
        Ok(path) => format!("{path:?}"),
        Err(_) => "of unknown name".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{Gid, Uid};
    use rustix::fs::{MemfdFlags, Mode, fchmod, fchown, fcntl_add_seals, memfd_create};
    use tmem_model::{Missing, skipped};

    const OTHER_USER: u32 = 4242;

    fn own_user() -> u32 {
        rustix::process::geteuid().as_raw()
    }

    /// Returns a new file on tmpfs that only its owner may read and write.
    fn on_tmpfs() -> File {
        let file = tempfile::tempfile_in("/dev/shm").expect("cannot create a file in /dev/shm");
        fchmod(&file, Mode::from_raw_mode(0o600)).expect("cannot set the mode of the file");
        file
    }

    fn refusal(file: &File, vmm_user: Option<u32>) -> String {
        let error = check(file, vmm_user).expect_err("the file was accepted");
        assert!(
            error.contains("memory-backend-memfd,share=on"),
            "the error names no remedy: {error}"
        );
        error
    }

    #[test]
    fn a_file_on_tmpfs_that_only_the_vmms_user_can_write_is_accepted() {
        let file = on_tmpfs();
        assert_eq!(check(&file, Some(own_user())), Ok(()));
        fchmod(&file, Mode::from_raw_mode(0o644)).expect("cannot set the mode of the file");
        assert_eq!(check(&file, Some(own_user())), Ok(()));
        // The dirty log of a migration has to be sealed.
        assert!(refusal(&file, None).contains("F_SEAL_SHRINK"));
    }

    #[test]
    fn a_file_that_group_or_others_can_write_is_refused() {
        let file = on_tmpfs();
        for mode in [0o620, 0o602, 0o660, 0o666] {
            fchmod(&file, Mode::from_raw_mode(mode)).expect("cannot set the mode of the file");
            let error = refusal(&file, Some(own_user()));
            let mode = format!("mode is {mode:o}");
            assert!(error.contains(&mode), "the error lacks {mode:?}: {error}");
        }
        // Each user who can open the descriptor in /proc can truncate a memfd without seals.
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memfd = File::from(memfd_create("test", flags).expect("cannot create a memfd"));
        assert!(refusal(&memfd, Some(own_user())).contains("/memfd:test"));
        fcntl_add_seals(&memfd, SealFlags::SHRINK).expect("cannot seal the memfd");
        assert_eq!(check(&memfd, None), Ok(()));
    }

    #[test]
    fn a_file_of_another_user_is_refused() {
        let file = on_tmpfs();
        let vmm_user = own_user() + 1;
        if own_user() == 0 {
            // The VMM cannot truncate a file of root, but root may end any connection anyway.
            assert_eq!(check(&file, Some(vmm_user)), Ok(()));
            let owner = Uid::from_raw(OTHER_USER);
            fchown(&file, Some(owner), None::<Gid>).expect("cannot set the owner of the file");
            assert_eq!(check(&file, Some(OTHER_USER)), Ok(()));
        } else {
            skipped(Missing::Root, "only root can change the owner of a file");
        }
        let error = refusal(&file, Some(vmm_user));
        for user in [format!("user {vmm_user}"), "The owner is user".into()] {
            assert!(error.contains(&user), "the error lacks {user:?}: {error}");
        }
    }

    /// A FUSE server could hang at any call, so a file that is not on tmpfs or hugetlbfs must be
    /// refused before its owner is read.
    #[test]
    fn a_file_outside_of_tmpfs_and_hugetlbfs_is_refused_by_its_path() {
        let file = File::open("/proc/self/maps").expect("cannot open /proc/self/maps");
        let error = refusal(&file, Some(own_user()));
        for part in ["/maps\"", "neither on tmpfs nor on hugetlbfs"] {
            assert!(error.contains(part), "the error lacks {part:?}: {error}");
        }
    }

    #[test]
    fn unsealed_huge_pages_must_not_be_writable_by_group_or_others() {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB;
        let file = File::from(memfd_create("test", flags).expect("cannot create a memfd"));
        refusal(&file, Some(own_user()));
        fchmod(&file, Mode::from_raw_mode(0o600)).expect("cannot set the mode of the memfd");
        assert_eq!(check(&file, Some(own_user())), Ok(()));
    }
}
