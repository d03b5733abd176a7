// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Handling of SIGBUS: shared memory that loses a page while the daemon has it mapped.
//!
//! No seal prevents a file of huge pages from losing a page. The process that shares the file can
//! punch a hole, and at the next access no huge page may be free. A memory error of the host
//! removes any page. The access raises SIGBUS, which by default ends the daemon and thereby every
//! VM's cache. The handler here finds the mapping, marks its memory as lost, and only then puts an
//! empty page of the daemon in that place, so that the access can continue. A thread that reads
//! shared memory and checks the mark afterwards therefore has the guest's bytes or learns of the
//! loss.
//!
//! The handler may interrupt any code. It uses atomic operations and system calls, and nothing that
//! allocates, locks or can panic. Out of scope: what happens to the VM.

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

/// Only this module can create a `Marked`, so that no code can replace a page without marking it
/// as lost.
mod mark {
    use super::*;

    /// Flag of the memory that a front end shares: set once a page is lost, and never cleared.
    #[derive(Debug, Default)]
    pub struct Lost(AtomicBool);

    /// Proof that memory is marked as lost, so that every later check reports the loss.
    pub struct Marked(());

    impl Lost {
        /// Returns true if a page of the memory was lost. Data that was read before may then be
        /// zeros from the daemon's replacement page, and data that was written may be missing.
        pub fn is_lost(&self) -> bool {
            // The fence orders this check after the reads that it covers.
            fence(Ordering::SeqCst);
            self.0.load(Ordering::SeqCst)
        }

        pub(super) fn mark(&self) -> Marked {
            self.0.store(true, Ordering::SeqCst);
            Marked(())
        }
    }
}

/// Returns the size of a file's pages in bytes: the unit in which its mapping can be replaced.
pub fn page_bytes(file: &File) -> io::Result<u64> {
    let stat = rustix::fs::fstatfs(file)?;
    Ok(match stat.f_type {
        HUGETLBFS_MAGIC => stat.f_bsize as u64,
        _ => rustix::param::page_size() as u64,
    })
}

/// Magic number of hugetlbfs, see statfs(2).
const HUGETLBFS_MAGIC: FsWord = 0x958458f6;

/// Registration of a mapping with the handler. It must be dropped before the mapping is unmapped.
#[derive(Debug)]
pub struct Watch {
    slot: &'static Slot,
    /// Keeps the flag alive, because the slot of the handler's table has a pointer to it.
    _lost: Arc<Lost>,
}

impl Watch {
    /// Watches a whole mapping of a file with pages of `page_bytes`.
    ///
    /// # Errors
    /// The system cannot install the handler.
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
        // The end is stored last, because it makes the slot valid for the handler.
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

/// Entry of the handler's table: one watched mapping.
#[derive(Debug)]
struct Slot {
    start: AtomicUsize,
    /// Address after the last byte of the mapping; 0 if the slot is free.
    end: AtomicUsize,
    page_bytes: AtomicUsize,
    lost: AtomicPtr<Lost>,
}

/// Number of slots in a chunk. It is more than one VM needs, and takes little memory.
const CHUNK_SLOTS: usize = 64;

/// A chunk of slots. Chunks are never freed, so the handler can read all slots at any time.
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

/// Guards the list of free slots. Leaf lock.
static FREE: Mutex<Free> = Mutex::new(Free {
    slots: Vec::new(),
    last: None,
});

struct Free {
    slots: Vec<&'static Slot>,
    /// The last chunk of the list; None before the first chunk is used.
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
                    // Freed slots are used again, so the table grows only up to the largest number
                    // of mappings that existed at one time.
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

/// The action of SIGBUS before the handler was installed.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

/// Installs the SIGBUS handler, unless it is already installed in this process.
fn install() -> io::Result<()> {
    /// Guards against two threads that install the handler at the same time.
    static INSTALL: Mutex<()> = Mutex::new(());
    let _guard = INSTALL.lock().unwrap_or_else(PoisonError::into_inner);
    if BEFORE.get().is_some() {
        return Ok(());
    }
    let mut before = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: the call only queries the action and fills `before`; a zeroed sigaction is valid.
    let before = unsafe {
        if libc::sigaction(libc::SIGBUS, null(), before.as_mut_ptr()) != 0 {
            return Err(io::Error::last_os_error());
        }
        before.assume_init()
    };
    // The previous action is stored before the handler is installed, because the handler reads it.
    let _ = BEFORE.set(before);
    let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = on_sigbus;
    // SAFETY: a zeroed sigaction is valid and blocks no signal. The handler only does what a signal
    // handler may do. Like the action before, it runs on the alternative stack if there is one.
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
    // SAFETY: the kernel passes a valid siginfo.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr().addr()) };
    // Other codes belong to no memory access: a process sent the signal, or the kernel reports an
    // error early.
    let is_fault = (libc::BUS_ADRALN..=libc::BUS_MCEERR_AR).contains(&code);
    if is_fault && replace(address) {
        return;
    }
    // SAFETY: async-signal-safe functions with valid arguments. The effect is the same as without
    // this handler: an access is repeated and meets the previous action, and any other SIGBUS ends
    // the process.
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

/// Marks the memory of an address as lost and then maps an empty page there. Returns false if the
/// address is in no watched mapping, or no page can be mapped.
fn replace(address: usize) -> bool {
    let mut chunk = &FIRST;
    loop {
        for slot in &chunk.slots {
            // The mapping that contains the address stays registered as long as this thread uses
            // it. Other mappings may be registered and removed meanwhile, but never at the same
            // address.
            let end = slot.end.load(Ordering::SeqCst);
            let start = slot.start.load(Ordering::SeqCst);
            let page_bytes = slot.page_bytes.load(Ordering::SeqCst);
            let lost = slot.lost.load(Ordering::SeqCst);
            let same = slot.end.load(Ordering::SeqCst) == end;
            if same && start <= address && address < end {
                // SAFETY: the mapping is registered, so its watch exists, which keeps the flag
                // alive.
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

/// Maps an empty page in place of a lost one. The argument proves that the memory is marked: a
/// thread that reads the empty page and checks afterwards must see the mark.
fn put_empty_page(page: usize, page_bytes: usize, _: mark::Marked) -> bool {
    let at = std::ptr::with_exposed_provenance_mut::<c_void>(page);
    // SAFETY: the call replaces a page that is lost, in a mapping that is only accessed as memory
    // that may change at any time. The page is unmapped with the rest of the mapping.
    unsafe {
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let mapped = rustix::mm::mmap_anonymous(at, page_bytes, prot, flags);
        // The page is excluded from core dumps, as the lost page was. If that fails, a core dump
        // may contain bytes of an answer.
        mapped.is_ok() && {
            let _ = rustix::mm::madvise(at, page_bytes, Advice::LinuxDontDump);
            true
        }
    }
}

/// Removes a page from a mapping, in tests and without privileges: it maps a truncated file in its
/// place.
#[cfg(test)]
pub fn take_away(start: *mut u8, bytes: usize) {
    let file = rustix::fs::memfd_create("gone", rustix::fs::MemfdFlags::CLOEXEC)
        .expect("cannot create a memfd");
    // SAFETY: the call replaces pages of a mapping that is only accessed as memory that may change
    // at any time.
    let mapped = unsafe {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        rustix::mm::mmap(start.cast(), bytes, prot, flags, &file, 0)
    };
    mapped.expect("cannot map an empty file");
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
            let file = memfd_create("lost", MemfdFlags::CLOEXEC).expect("cannot create a memfd");
            let bytes = pages * PAGE;
            ftruncate(&file, bytes as u64).expect("cannot set the length of the memfd");
            // SAFETY: a fresh mapping at an address of the kernel's choice.
            let start = unsafe {
                let prot = ProtFlags::READ | ProtFlags::WRITE;
                rustix::mm::mmap(null_mut(), bytes, prot, MapFlags::SHARED, &file, 0)
            };
            Mapping {
                start: start.expect("cannot map the file").cast(),
                bytes,
                file: file.into(),
            }
        }

        fn watch(&self, lost: &Arc<Lost>) -> Watch {
            Watch::new(self.start, self.bytes, PAGE as u64, lost).expect("cannot watch the mapping")
        }

        fn at(&self, page: usize) -> *mut u8 {
            self.start.wrapping_add(page * PAGE)
        }

        fn read(&self, page: usize) -> u8 {
            // SAFETY: the address is inside the mapping, which is only accessed by volatile
            // operations.
            unsafe { self.at(page).read_volatile() }
        }

        fn write(&self, page: usize, byte: u8) {
            // SAFETY: the address is inside the mapping, which is only accessed by volatile
            // operations.
            unsafe { self.at(page).write_volatile(byte) };
        }
    }

    impl Drop for Mapping {
        fn drop(&mut self) {
            // SAFETY: nothing uses the mapping any more.
            let _ = unsafe { rustix::mm::munmap(self.start.cast(), self.bytes) };
        }
    }

    #[test]
    fn a_lost_page_reads_as_zeros_and_is_reported() {
        let (one, other) = (Mapping::new(4), Mapping::new(4));
        let (lost, kept) = (Arc::<Lost>::default(), Arc::<Lost>::default());
        let (_a, _b) = (one.watch(&lost), other.watch(&kept));
        for page in 0..4 {
            one.write(page, 7);
            other.write(page, 7);
        }
        assert!(!lost.is_lost());
        rustix::fs::ftruncate(&one.file, 2 * PAGE as u64).expect("cannot truncate the file");
        assert_eq!((one.read(0), one.read(1)), (7, 7));
        assert!(
            !lost.is_lost(),
            "a loss was reported before a thread accessed the lost page"
        );
        assert_eq!(one.read(2), 0);
        assert!(lost.is_lost());
        // The mapping can still be read and written, and its other pages keep their content.
        one.write(2, 9);
        one.write(3, 9);
        assert_eq!((one.read(1), one.read(2), one.read(3)), (7, 9, 9));
        assert_eq!(other.read(2), 7);
        assert!(
            !kept.is_lost(),
            "the loss was reported for another mapping, too"
        );
    }

    /// A thread that reads a page while another thread replaces it must see the mark, too. The test
    /// tries many points in time; with the wrong order of marking and replacing, some of them fail.
    #[test]
    fn each_reader_of_a_replaced_page_sees_that_it_was_lost() {
        const ROUNDS: u32 = 1500;
        /// Number of iterations of an empty loop that take longer than the replacement of a page.
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
                    // The thread reads at a different point in time in each round.
                    for _ in 0..round.wrapping_mul(7919) % SPINS {
                        std::hint::spin_loop();
                    }
                    let page = std::ptr::with_exposed_provenance::<u8>(page);
                    // SAFETY: the address is inside the mapping, which is only accessed by volatile
                    // operations.
                    (unsafe { page.read_volatile() }, lost.is_lost())
                });
                take_away(mapping.at(0), PAGE);
                gone.store(true, Ordering::SeqCst);
                mapping.read(0);
                assert_eq!(
                    other.join().expect("the reading thread panicked"),
                    (0, true),
                    "round {round}: the thread read a byte other than 0 or did not see the loss"
                );
            });
        }
    }

    #[test]
    fn slots_are_reused_and_unlimited() {
        let mappings: Vec<Mapping> = (0..3 * CHUNK_SLOTS).map(|_| Mapping::new(2)).collect();
        for round in 0..3 {
            let lost: Vec<Arc<Lost>> = mappings.iter().map(|_| Arc::default()).collect();
            let all = mappings.iter().zip(&lost);
            let _watches: Vec<Watch> = all.map(|(mapping, lost)| mapping.watch(lost)).collect();
            let one = round * CHUNK_SLOTS + 5;
            take_away(mappings[one].at(1), PAGE);
            assert_eq!(mappings[one].read(1), 0);
            for (number, lost) in lost.iter().enumerate() {
                assert_eq!(
                    lost.is_lost(),
                    number == one,
                    "mapping {number} of {one} was reported wrongly; only {one} lost a page"
                );
            }
        }
    }

    /// Runs a test of this file in a process of its own, because the test ends its process.
    fn ends_with(name: &str) -> std::process::ExitStatus {
        let program = std::env::current_exe().expect("cannot find the program of this test");
        let name = format!("memory::sigbus::tests::{name}");
        let mut command = std::process::Command::new(program);
        command.args([&name, "--exact", "--ignored", "--nocapture"]);
        let output = command.output().expect("cannot run the program");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(
            text.contains("running 1 test"),
            "the process did not run exactly one test: {text}"
        );
        output.status
    }

    #[test]
    fn a_fault_outside_watched_memory_ends_the_process() {
        for name in [
            "reads_memory_that_is_no_longer_watched",
            "sends_sigbus_to_its_own_process",
        ] {
            assert_eq!(
                ends_with(name).signal(),
                Some(libc::SIGBUS),
                "{name}: SIGBUS did not end the process"
            );
        }
    }

    #[test]
    #[ignore = "ends its process: for a_fault_outside_watched_memory_ends_the_process"]
    fn reads_memory_that_is_no_longer_watched() {
        let mapping = Mapping::new(2);
        let lost = Arc::default();
        drop(mapping.watch(&lost));
        take_away(mapping.at(0), PAGE);
        mapping.read(0);
    }

    #[test]
    #[ignore = "ends its process: for a_fault_outside_watched_memory_ends_the_process"]
    fn sends_sigbus_to_its_own_process() {
        let mapping = Mapping::new(2);
        let lost = Arc::default();
        let _watch = mapping.watch(&lost);
        let own = rustix::process::getpid();
        rustix::process::kill_process(own, rustix::process::Signal::BUS)
            .expect("cannot send the signal");
        // The thread waits here, because any thread of the process may receive the signal.
        std::thread::sleep(std::time::Duration::from_secs(60));
    }
}
