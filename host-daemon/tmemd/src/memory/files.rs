// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Files of a VM's memory, to find out how much of the memory the host has allocated.
//!
//! A guest that returns free memory to the host (free page reporting) keeps its size, but its file
//! has holes. Only the file's number of blocks shows them. The daemon therefore keeps one descriptor
//! of each file of the current memory table. Limit: a VM with more than [`FILES_MAX`] files, for
//! example with many DIMMs, would use up descriptors, so its allocated memory is unknown.

use rustix::fs::fstat;
use std::fs::File;
use std::mem;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Maximum number of files of a VM whose descriptors are kept. QEMU has one file for each NUMA node.
pub const FILES_MAX: usize = 4;

/// Bytes of a block in `st_blocks`.
const BLOCK_BYTES: u64 = 512;

/// Identity of a file: its device and its inode.
pub type FileId = (u64, u64);

/// Returns the identity of a file; None if the file cannot be examined.
pub fn id(file: &File) -> Option<FileId> {
    fstat(file).ok().map(|stat| (stat.st_dev, stat.st_ino))
}

/// Files of a VM's memory.
#[derive(Debug, Default)]
pub struct GuestFiles(Mutex<Files>);

#[derive(Debug, Default)]
struct Files {
    /// One descriptor of each file.
    open: Vec<(FileId, File)>,
    /// Whether `open` contains all files of the current memory table.
    are_all: bool,
}

impl GuestFiles {
    fn lock(&self) -> MutexGuard<'_, Files> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a file of the next memory table, if the descriptors of both tables stay within twice the
    /// maximum.
    pub fn add(&self, id: Option<FileId>, file: File) {
        let mut files = self.lock();
        if let Some(id) = id
            && files.open.len() < 2 * FILES_MAX
            && files.open.iter().all(|(other, _)| *other != id)
        {
            files.open.push((id, file));
        }
    }

    /// Closes the files that are not in the new memory table, which has regions of files with these
    /// identities. Closes all files if they are too many.
    pub fn keep(&self, regions: impl Iterator<Item = Option<FileId>> + Clone) {
        let mut files = self.lock();
        let is_used = |(id, _): &(FileId, File)| regions.clone().any(|region| region == Some(*id));
        let (used, mut closed): (Vec<_>, Vec<_>) =
            mem::take(&mut files.open).into_iter().partition(is_used);
        files.open = used;
        let is_open = |region: Option<FileId>| files.open.iter().any(|(id, _)| Some(*id) == region);
        let are_all = files.open.len() <= FILES_MAX && regions.clone().all(is_open);
        files.are_all = are_all && regions.count() > 0;
        if !files.are_all {
            closed.append(&mut files.open);
        }
        // The last descriptor of a file frees its memory, which takes seconds for a large file.
        // Clients that read the statistics wait for the lock.
        drop(files);
        drop(closed);
    }

    /// Returns the bytes that the host has allocated for the files; None if that is unknown.
    pub fn allocated_bytes(&self) -> Option<u64> {
        let files = self.lock();
        let blocks = |(_, file): &(FileId, File)| Some(fstat(file).ok()?.st_blocks as u64);
        let sum: Option<u64> = files.open.iter().map(blocks).sum();
        sum.filter(|_| files.are_all)
            .map(|blocks| blocks * BLOCK_BYTES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};

    const MIB: u64 = 1 << 20;

    fn memory() -> File {
        let file: File = memfd_create("test", MemfdFlags::CLOEXEC)
            .expect("cannot create a memfd")
            .into();
        ftruncate(&file, 4 * MIB).expect("cannot set the length of the memfd");
        file
    }

    fn add(files: &GuestFiles, file: &File) -> Option<FileId> {
        let copy = file.try_clone().expect("cannot duplicate the descriptor");
        files.add(id(file), copy);
        id(file)
    }

    #[test]
    fn allocated_memory_follows_the_holes_of_the_files() {
        let files = GuestFiles::default();
        let (a, b) = (memory(), memory());
        assert_eq!(files.allocated_bytes(), None, "there is no memory yet");
        let ids = [add(&files, &a), add(&files, &b), add(&files, &a)];
        files.keep(ids.into_iter());
        assert_eq!(files.allocated_bytes(), Some(0));
        for file in [&a, &b] {
            fallocate(file, FallocateFlags::empty(), 0, 2 * MIB).expect("cannot allocate memory");
        }
        assert_eq!(
            files.allocated_bytes(),
            Some(4 * MIB),
            "a file counts twice or not at all"
        );
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&a, hole, 0, MIB).expect("cannot punch a hole");
        assert_eq!(files.allocated_bytes(), Some(3 * MIB));
        files.keep([id(&b)].into_iter());
        assert_eq!(files.allocated_bytes(), Some(2 * MIB));
        files.keep([].into_iter());
        assert_eq!(
            (files.allocated_bytes(), files.lock().open.len()),
            (None, 0)
        );
    }

    #[test]
    fn files_are_closed_if_there_are_too_many() {
        let files = GuestFiles::default();
        let all: Vec<File> = (0..4 * FILES_MAX).map(|_| memory()).collect();
        let ids: Vec<_> = all.iter().map(|file| add(&files, file)).collect();
        assert_eq!(files.lock().open.len(), 2 * FILES_MAX);
        files.keep(ids.iter().copied());
        assert_eq!(
            (files.allocated_bytes(), files.lock().open.len()),
            (None, 0)
        );
        // After the VM has fewer files, only a new memory table has their descriptors.
        files.keep(ids[..1].iter().copied());
        assert_eq!(files.allocated_bytes(), None);
        add(&files, &all[0]);
        files.keep(ids[..1].iter().copied());
        assert_eq!(files.allocated_bytes(), Some(0));
    }
}
