// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Shared memory that loses a page while the daemon has it mapped.
//!
//! No seal keeps a file of huge pages from losing one: whoever shares it punches a hole, and at the
//! next access there may be none left. A memory error takes any page. The access is a SIGBUS, which
//! by default ends the daemon and with it every VM's cache. Here its handler finds out whose mapping
//! it was, marks that memory as lost, and only then puts an empty page of the daemon's own in the
//! place, so that the access goes on. So whoever reads shared memory and looks afterwards either has
//! the guest's bytes or is told.
//!
//! The handler runs in the middle of anything: it uses atomics and system calls, and nothing that
//! allocates, locks or can panic. Never here: what becomes of the VM.

use rustix::fs::FsWord;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::ffi::{c_int, c_void};
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

pub use mark::Lost;

/// So that nobody can replace a page that is not marked: what shows it is made here alone.
mod mark {
    use super::*;

    /// Whether the memory that a front end shares has lost a page; never taken back.
    #[derive(Debug, Default)]
    pub struct Lost(AtomicBool);

    /// A memory is marked as lost, and all who look from now on are told.
    pub struct Marked(());

    impl Lost {
        /// What was read until now may be the daemon's own zeros, and what was written may be nowhere.
        pub fn is_lost(&self) -> bool {
            // After the reads that it is asked about.
            fence(Ordering::SeqCst);
            self.0.load(Ordering::SeqCst)
        }

        pub(super) fn mark(&self) -> Marked {
            self.0.store(true, Ordering::SeqCst);
            Marked(())
        }
    }
}

/// Bytes of a page of a file: what can be replaced of its mapping.
pub fn page_bytes(file: &File) -> io::Result<u64> {
    let stat = rustix::fs::fstatfs(file)?;
    Ok(match stat.f_type {
        HUGETLBFS_MAGIC => stat.f_bsize as u64,
        _ => rustix::param::page_size() as u64,
    })
}

/// See statfs(2).
const HUGETLBFS_MAGIC: FsWord = 0x958458f6;

/// A mapping whose loss is survived, for as long as this lives. To be dropped before it is unmapped.
#[derive(Debug)]
pub struct Watch {
    slot: &'static Slot,
    /// The slot points to it.
    _lost: Arc<Lost>,
}

impl Watch {
    /// Watches a mapping, all of it, of a file with such pages.
    ///
    /// # Errors
    /// The system takes no handler for it.
    pub fn new(
        start: *const u8,
        bytes: usize,
        page_bytes: u64,
        lost: &Arc<Lost>,
    ) -> io::Result<Watch> {
        install()?;
        let slot = free_slots().take();
        let start = start.addr();
        slot.page_bytes.store(page_bytes as usize, Ordering::SeqCst);
        let lost_ptr = Arc::as_ptr(lost).cast_mut();
        slot.lost.store(lost_ptr, Ordering::SeqCst);
        slot.start.store(start, Ordering::SeqCst);
        // Last: from here on the slot is used.
        slot.end.store(start + bytes, Ordering::SeqCst);
        Ok(Watch {
            slot,
            _lost: lost.clone(),
        })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.slot.end.store(0, Ordering::SeqCst);
        free_slots().slots.push(self.slot);
    }
}

/// A mapping, as the handler sees it.
#[derive(Debug)]
struct Slot {
    start: AtomicUsize,
    /// After its last byte. 0: there is none.
    end: AtomicUsize,
    page_bytes: AtomicUsize,
    lost: AtomicPtr<Lost>,
}

/// Mappings of a chunk: more than a VM has, few enough to be nothing.
const CHUNK_SLOTS: usize = 64;

/// Slots stay where they are for ever, so that the handler can look at all of them at any time.
struct Chunk {
    slots: [Slot; CHUNK_SLOTS],
    next: AtomicPtr<Chunk>,
}

impl Chunk {
    const fn new() -> Chunk {
        Chunk {
            slots: [const {
                Slot {
                    start: AtomicUsize::new(0),
                    end: AtomicUsize::new(0),
                    page_bytes: AtomicUsize::new(0),
                    lost: AtomicPtr::new(null_mut()),
                }
            }; CHUNK_SLOTS],
            next: AtomicPtr::new(null_mut()),
        }
    }
}

static FIRST: Chunk = Chunk::new();

/// Guards which slots are free. Taken alone.
static FREE: Mutex<Free> = Mutex::new(Free {
    slots: Vec::new(),
    last: None,
});

struct Free {
    slots: Vec<&'static Slot>,
    /// The chunk that another one comes after. None: the first one is not used yet.
    last: Option<&'static Chunk>,
}

fn free_slots() -> std::sync::MutexGuard<'static, Free> {
    FREE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Free {
    fn take(&mut self) -> &'static Slot {
        loop {
            if let Some(slot) = self.slots.pop() {
                return slot;
            }
            let chunk: &'static Chunk = match self.last {
                None => &FIRST,
                Some(last) => {
                    // As many as there ever were mappings at once; they are used again.
                    let chunk = Box::leak(Box::new(Chunk::new()));
                    last.next.store(chunk, Ordering::SeqCst);
                    chunk
                }
            };
            self.last = Some(chunk);
            self.slots.extend(&chunk.slots);
        }
    }
}

/// What SIGBUS did before.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

/// Takes SIGBUS over, once for the process.
fn install() -> io::Result<()> {
    /// Guards that only one does it.
    static INSTALL: Mutex<()> = Mutex::new(());
    let _guard = INSTALL.lock().unwrap_or_else(PoisonError::into_inner);
    if BEFORE.get().is_some() {
        return Ok(());
    }
    let mut before = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: it only asks, and fills what it is given; zeros are a valid sigaction.
    let before = unsafe {
        if libc::sigaction(libc::SIGBUS, null(), before.as_mut_ptr()) != 0 {
            return Err(io::Error::last_os_error());
        }
        before.assume_init()
    };
    // Before the handler is there, which needs it.
    let _ = BEFORE.set(before);
    let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = on_sigbus;
    // SAFETY: zeros are a valid sigaction, with no signal blocked. The handler keeps to what is
    // allowed in one; it runs on the alternative stack, where there is one, as the one before did.
    let done = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigaction(libc::SIGBUS, &action, null_mut())
    };
    match done {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

extern "C" fn on_sigbus(_: c_int, info: *mut libc::siginfo_t, _: *mut c_void) {
    // SAFETY: the kernel passes a valid one.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr().addr()) };
    // The others are not of an access: sent by somebody, or told for information.
    let is_fault = (libc::BUS_ADRALN..=libc::BUS_MCEERR_AR).contains(&code);
    if is_fault && replace(address) {
        return;
    }
    // SAFETY: async-signal-safe functions with valid arguments. What follows is what would have
    // been without this handler: an access is made again and meets the handler before, anything
    // else ends the process.
    unsafe {
        match BEFORE.get() {
            Some(before) if is_fault => {
                libc::sigaction(libc::SIGBUS, before, null_mut());
            }
            _ => {
                libc::signal(libc::SIGBUS, libc::SIG_DFL);
                libc::raise(libc::SIGBUS);
            }
        }
    }
}

/// Marks the memory that an address belongs to as lost, then puts an empty page there. False: it is
/// no memory of a front end, or there is no page.
fn replace(address: usize) -> bool {
    let mut chunk = &FIRST;
    loop {
        for slot in &chunk.slots {
            // The mapping that is looked for stays as long as this thread uses it. Others come and
            // go meanwhile, but those that the same slot is used for are never where it is.
            let end = slot.end.load(Ordering::SeqCst);
            let start = slot.start.load(Ordering::SeqCst);
            let page_bytes = slot.page_bytes.load(Ordering::SeqCst);
            let lost = slot.lost.load(Ordering::SeqCst);
            let same = slot.end.load(Ordering::SeqCst) == end;
            if same && start <= address && address < end {
                // SAFETY: the mapping is there, so its watch is, which keeps this alive.
                let marked = unsafe { (*lost).mark() };
                let page = address & !page_bytes.wrapping_sub(1);
                return put_empty_page(page, page_bytes, marked);
            }
        }
        let next = chunk.next.load(Ordering::SeqCst);
        if next.is_null() {
            return false;
        }
        // SAFETY: chunks are never freed.
        chunk = unsafe { &*next };
    }
}

/// Only after the mark: who reads the empty page and looks then must be told.
fn put_empty_page(page: usize, page_bytes: usize, _: mark::Marked) -> bool {
    let at = std::ptr::with_exposed_provenance_mut::<c_void>(page);
    // SAFETY: it replaces a page of a mapping that is only accessed as memory that may change at
    // any time, and that no longer has this page. It is unmapped with the rest.
    unsafe {
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let mapped = rustix::mm::mmap_anonymous(at, page_bytes, prot, flags);
        // As the page before. What is not left out of a dump is what was about to be answered.
        mapped.is_ok() && {
            let _ = rustix::mm::madvise(at, page_bytes, Advice::LinuxDontDump);
            true
        }
    }
}

/// Tests take pages away with it, without privileges: in the place of some of a mapping comes a
/// file that was truncated.
#[cfg(test)]
pub fn take_away(start: *mut u8, bytes: usize) {
    let file = rustix::fs::memfd_create("gone", rustix::fs::MemfdFlags::CLOEXEC).expect("memfd");
    // SAFETY: as for `put_empty_page`.
    let mapped = unsafe {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        rustix::mm::mmap(start.cast(), bytes, prot, flags, &file, 0)
    };
    mapped.expect("a mapping of an empty file");
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use std::os::unix::process::ExitStatusExt;

    const PAGE: usize = 4096;

    struct Mapping {
        start: *mut u8,
        bytes: usize,
        file: File,
    }

    impl Mapping {
        fn new(pages: usize) -> Mapping {
            let file = memfd_create("lost", MemfdFlags::CLOEXEC).expect("memfd");
            let bytes = pages * PAGE;
            ftruncate(&file, bytes as u64).expect("its length");
            // SAFETY: a fresh mapping at an address of the kernel's choice.
            let start = unsafe {
                let prot = ProtFlags::READ | ProtFlags::WRITE;
                rustix::mm::mmap(null_mut(), bytes, prot, MapFlags::SHARED, &file, 0)
            };
            Mapping {
                start: start.expect("mapped").cast(),
                bytes,
                file: file.into(),
            }
        }

        fn watch(&self, lost: &Arc<Lost>) -> Watch {
            Watch::new(self.start, self.bytes, PAGE as u64, lost).expect("watched")
        }

        fn at(&self, page: usize) -> *mut u8 {
            self.start.wrapping_add(page * PAGE)
        }

        fn read(&self, page: usize) -> u8 {
            // SAFETY: inside of the mapping, which is only accessed so.
            unsafe { self.at(page).read_volatile() }
        }

        fn write(&self, page: usize, byte: u8) {
            // SAFETY: as above.
            unsafe { self.at(page).write_volatile(byte) };
        }
    }

    impl Drop for Mapping {
        fn drop(&mut self) {
            // SAFETY: nobody uses it any more.
            let _ = unsafe { rustix::mm::munmap(self.start.cast(), self.bytes) };
        }
    }

    #[test]
    fn a_page_that_has_gone_is_empty_and_told() {
        let (one, other) = (Mapping::new(4), Mapping::new(4));
        let (lost, kept) = (Arc::<Lost>::default(), Arc::<Lost>::default());
        let (_a, _b) = (one.watch(&lost), other.watch(&kept));
        for page in 0..4 {
            one.write(page, 7);
            other.write(page, 7);
        }
        assert!(!lost.is_lost());
        rustix::fs::ftruncate(&one.file, 2 * PAGE as u64).expect("shorter");
        assert_eq!((one.read(0), one.read(1)), (7, 7));
        assert!(!lost.is_lost(), "nobody has touched what has gone");
        assert_eq!(one.read(2), 0);
        assert!(lost.is_lost());
        // Reads and writes go on, and the rest is what it was.
        one.write(2, 9);
        one.write(3, 9);
        assert_eq!((one.read(1), one.read(2), one.read(3)), (7, 9, 9));
        assert_eq!(other.read(2), 7);
        assert!(!kept.is_lost(), "another's memory");
    }

    /// Another thread that reads the page just when it is replaced is told, too. What is tried are
    /// moments: without the order some of them fail.
    #[test]
    fn nobody_reads_an_empty_page_and_is_not_told() {
        const ROUNDS: u32 = 1500;
        /// Until the page has been replaced surely.
        const SPINS: u32 = 2000;
        for round in 0..ROUNDS {
            let mapping = Mapping::new(1);
            let lost = Arc::<Lost>::default();
            let _watch = mapping.watch(&lost);
            mapping.write(0, 7);
            let page = mapping.at(0).expose_provenance();
            let gone = AtomicBool::new(false);
            std::thread::scope(|scope| {
                let (gone, lost) = (&gone, &lost);
                let other = scope.spawn(move || {
                    while !gone.load(Ordering::SeqCst) {
                        std::hint::spin_loop();
                    }
                    // In another moment each time, near and far.
                    for _ in 0..round.wrapping_mul(7919) % SPINS {
                        std::hint::spin_loop();
                    }
                    let page = std::ptr::with_exposed_provenance::<u8>(page);
                    // SAFETY: inside of the mapping, which is only accessed so.
                    (unsafe { page.read_volatile() }, lost.is_lost())
                });
                take_away(mapping.at(0), PAGE);
                gone.store(true, Ordering::SeqCst);
                mapping.read(0);
                assert_eq!(other.join().expect("it reads"), (0, true), "round {round}");
            });
        }
    }

    #[test]
    fn slots_are_used_again_and_there_are_as_many_as_needed() {
        let mappings: Vec<Mapping> = (0..3 * CHUNK_SLOTS).map(|_| Mapping::new(2)).collect();
        for round in 0..3 {
            let lost: Vec<Arc<Lost>> = mappings.iter().map(|_| Arc::default()).collect();
            let all = mappings.iter().zip(&lost);
            let _watches: Vec<Watch> = all.map(|(mapping, lost)| mapping.watch(lost)).collect();
            let one = round * CHUNK_SLOTS + 5;
            take_away(mappings[one].at(1), PAGE);
            assert_eq!(mappings[one].read(1), 0);
            for (number, lost) in lost.iter().enumerate() {
                assert_eq!(lost.is_lost(), number == one, "mapping {number}");
            }
        }
    }

    /// Runs a test of this file that must end its process, in another one.
    fn ends_with(name: &str) -> std::process::ExitStatus {
        let program = std::env::current_exe().expect("this program");
        let name = format!("memory::sigbus::tests::{name}");
        let mut command = std::process::Command::new(program);
        command.args([&name, "--exact", "--ignored", "--nocapture"]);
        let output = command.output().expect("it runs");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(text.contains("running 1 test"), "{text}");
        output.status
    }

    #[test]
    fn what_is_not_watched_ends_the_process() {
        for name in ["no_longer_watched", "sent"] {
            assert_eq!(ends_with(name).signal(), Some(libc::SIGBUS), "{name}");
        }
    }

    #[test]
    #[ignore = "ends its process: for what_is_not_watched_ends_the_process"]
    fn no_longer_watched() {
        let mapping = Mapping::new(2);
        let lost = Arc::default();
        drop(mapping.watch(&lost));
        take_away(mapping.at(0), PAGE);
        mapping.read(0);
    }

    #[test]
    #[ignore = "ends its process: for what_is_not_watched_ends_the_process"]
    fn sent() {
        let mapping = Mapping::new(2);
        let lost = Arc::default();
        let _watch = mapping.watch(&lost);
        let own = rustix::process::getpid();
        rustix::process::kill_process(own, rustix::process::Signal::BUS).expect("sent");
        // Whichever thread takes it.
        std::thread::sleep(std::time::Duration::from_secs(60));
    }
}
