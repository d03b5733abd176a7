// SPDX-License-Identifier: Apache-2.0 OR MIT
//! SIGBUS handler, for shared memory that loses a page while the daemon has it mapped.
//!
//! No seal prevents a file of huge pages from losing a page. The process that shares the file can
//! punch a hole into it, and at the next access no huge page may be free. A memory error of the
//! host can remove any page. The access to a lost page raises SIGBUS, which by default ends the
//! daemon and thereby every VM's cache. The handler in this file finds the mapping and marks its
//! memory as lost. Only then does it map an empty page of the daemon in place of the lost page, so
//! that the access can continue. If a thread reads shared memory and checks the mark afterwards, it
//! therefore has the guest's bytes or learns of the loss.
//!
//! The handler may interrupt any code. It uses only atomic operations and system calls, and nothing
//! that allocates, locks or can panic. Out of scope: what happens to the VM whose memory is lost.

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

/// Only the module `mark` can create a `Marked`, the proof that memory is marked as lost. So no
/// other code can replace a page without marking the memory as lost.
mod mark {
    use super::*;

    /// Flag of memory that a front end shares. The SIGBUS handler sets the flag when a page of the
    /// memory is lost. No code clears it.
    #[derive(Debug, Default)]
    pub struct Lost(AtomicBool);

    /// Proof that the flag `Lost` of a memory is set: every later call of `Lost::is_lost` for
    /// that memory returns true.
    pub struct Marked(());

    impl Lost {
        /// Returns true if a page of the memory was lost. In this case, data that the daemon read
        /// from the memory may be zeros from the replacement page, and data that it wrote may be
        /// missing.
        pub fn is_lost(&self) -> bool {
            // The fence orders the load of the flag after the accesses of the caller to shared
            // memory. It is SeqCst because of the writes: an Acquire fence orders only reads.
            fence(Ordering::SeqCst);
            self.0.load(Ordering::SeqCst)
        }

        /// Returns true if data that the caller has read from the memory before may be zeros from a
        /// replacement page. A false result says nothing about data that the caller wrote. For
        /// that, [`is_lost`](Self::is_lost) waits until the processor has written all data, which
        /// delays each page of a put.
        pub fn is_read_lost(&self) -> bool {
            // The fence orders the load of the flag after the reads of shared memory that the
            // caller made before.
            fence(Ordering::Acquire);
            self.0.load(Ordering::Relaxed)
        }

        pub(super) fn mark(&self) -> Marked {
            self.0.store(true, Ordering::SeqCst);
            Marked(())
        }
    }
}

/// Returns the size in bytes of the pages of a file. Its mapping can only be replaced in units of
/// this size.
pub fn page_bytes(file: &File) -> io::Result<u64> {
    let stat = rustix::fs::fstatfs(file)?;
    Ok(match stat.f_type {
        HUGETLBFS_MAGIC => stat.f_bsize as u64,
        _ => rustix::param::page_size() as u64,
    })
}

/// Magic number by which statfs(2) identifies hugetlbfs, the file system of huge pages.
const HUGETLBFS_MAGIC: FsWord = 0x958458f6;

/// Registration of a mapping with the SIGBUS handler. The owner must drop it before the mapping is
/// unmapped.
#[derive(Debug)]
pub struct Watch {
    slot: &'static Slot,
    /// Reference that keeps the flag alive, because the slot in the handler's table has a pointer
    /// to the flag.
    _lost: Arc<Lost>,
}

impl Watch {
    /// Registers a complete mapping of a file whose pages have `page_bytes` bytes.
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
        // The end address is stored last, because the handler ignores a slot whose end is 0.
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

/// Slot of the SIGBUS handler's table, which describes one registered mapping.
#[derive(Debug)]
struct Slot {
    start: AtomicUsize,
    /// Address after the last byte of the mapping; 0 if the slot is free.
    end: AtomicUsize,
    page_bytes: AtomicUsize,
    lost: AtomicPtr<Lost>,
}

/// Number of slots in a chunk of the handler's table. They suffice for the mappings of several
/// usual VMs and take little memory.
const CHUNK_SLOTS: usize = 64;

/// A chunk of the handler's table, which is a linked list of chunks. Chunks are never freed, so the
/// handler can read all slots at any time.
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

/// Guards the list of free slots of the handler's table. Leaf lock.
static FREE: Mutex<Free> = Mutex::new(Free {
    slots: Vec::new(),
    last: None,
});

struct Free {
    slots: Vec<&'static Slot>,
    /// The last chunk of the handler's table; None before the first chunk is used.
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
                    // The table grows only up to the largest number of mappings that exist at one
                    // time, because free slots are used again.
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

/// Signal action of SIGBUS that the process had before this file installed its handler.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

/// Installs the SIGBUS handler, unless it is already installed in this process.
fn install() -> io::Result<()> {
    /// Guards the installation, so that two threads cannot install the handler at the same time.
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
    // The previous action is stored before the handler is installed, because the handler may read
    // it at once.
    let _ = BEFORE.set(before);
    let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = on_sigbus;
    // SAFETY: a zeroed sigaction is valid and blocks no signal. The handler uses only functions
    // that are allowed in signal handlers. Like the previous handler, it runs on the alternative
    // signal stack if there is one.
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
    // SIGBUS with another si_code does not come from an access to memory: a process sent the
    // signal, or the kernel reports a memory error before an access.
    let is_fault = (libc::BUS_ADRALN..=libc::BUS_MCEERR_AR).contains(&code);
    if is_fault && replace(address) {
        return;
    }
    // SAFETY: the functions are async-signal-safe, and their arguments are valid. After a failed
    // access, the code restores the previous action. The CPU then repeats the access, and the
    // previous action handles its SIGBUS. Any other SIGBUS ends the process.
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

/// Marks the memory that contains an address as lost, and then maps an empty page at the address.
/// Returns false if no registered mapping contains the address, or if no page can be mapped.
fn replace(address: usize) -> bool {
    let mut chunk = &FIRST;
    loop {
        for slot in &chunk.slots {
            // The mapping that contains the address stays registered, because the interrupted
            // thread uses it. Other threads may register and remove other mappings meanwhile, but
            // not at the same address.
            let end = slot.end.load(Ordering::SeqCst);
            let start = slot.start.load(Ordering::SeqCst);
            let page_bytes = slot.page_bytes.load(Ordering::SeqCst);
            let lost = slot.lost.load(Ordering::SeqCst);
            let same = slot.end.load(Ordering::SeqCst) == end;
            if same && start <= address && address < end {
                // SAFETY: the mapping is registered, so its `Watch` exists and keeps the flag
                // `lost` alive.
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

/// Maps an empty page in place of a lost page. Returns false if the system cannot map the page. The
/// argument of type `Marked` proves that the memory is already marked as lost. A thread that reads
/// the empty page and then checks the mark therefore learns of the loss.
fn put_empty_page(page: usize, page_bytes: usize, _: mark::Marked) -> bool {
    let at = std::ptr::with_exposed_provenance_mut::<c_void>(page);
    // SAFETY: the call replaces a page that is lost. All accesses to the mapping allow for memory
    // that may change at any time. The empty page is unmapped together with the mapping.
    unsafe {
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let mapped = rustix::mm::mmap_anonymous(at, page_bytes, prot, flags);
        // Core dumps must not contain the empty page, as they did not contain the lost page. If
        // madvise(2) fails, a core dump may contain bytes of an answer to a guest.
        mapped.is_ok() && {
            let _ = rustix::mm::madvise(at, page_bytes, Advice::LinuxDontDump);
            true
        }
    }
}

/// Removes pages from a mapping, for tests and without privileges: maps a truncated file in place
/// of the pages, so that an access to them raises SIGBUS.
#[cfg(test)]
pub fn take_away(start: *mut u8, bytes: usize) {
    let file = rustix::fs::memfd_create("gone", rustix::fs::MemfdFlags::CLOEXEC)
        .expect("cannot create a memfd");
    // SAFETY: the call replaces pages of a mapping. All accesses to the mapping allow for memory
    // that may change at any time.
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
            // SAFETY: the kernel chooses the address of the new mapping, so it overlaps no other
            // mapping.
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
            // SAFETY: no code uses the mapping any more.
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
        // After the loss, the test can still read and write the mapping, and its other pages keep
        // their content.
        one.write(2, 9);
        one.write(3, 9);
        assert_eq!((one.read(1), one.read(2), one.read(3)), (7, 9, 9));
        assert_eq!(other.read(2), 7);
        assert!(
            !kept.is_lost(),
            "the loss was reported for a mapping that lost no page"
        );
    }

    /// If a thread reads a page that another thread has replaced, the reading thread must see the
    /// lost flag, too. The test reads at many different points in time. If a page were replaced
    /// before the flag of its memory is set, some of the reads would not see the flag.
    #[test]
    fn a_thread_that_reads_a_replaced_page_also_sees_the_lost_flag() {
        const ROUNDS: u32 = 1500;
        /// Number of iterations of an empty loop that together take longer than replacing a page.
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
                    // The thread waits for a different time in each round before it reads.
                    for _ in 0..round.wrapping_mul(7919) % SPINS {
                        std::hint::spin_loop();
                    }
                    let page = std::ptr::with_exposed_provenance::<u8>(page);
                    // SAFETY: the address is inside the mapping, which is only accessed by volatile
                    // operations.
                    let byte = unsafe { page.read_volatile() };
                    (byte, lost.is_read_lost() && lost.is_lost())
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
    fn the_sigbus_handler_reuses_slots_for_any_number_of_mappings() {
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
                    "the loss mark of mapping {number} is wrong: only mapping {one} lost a page"
                );
            }
        }
    }

    /// Runs a test of this file in a process of its own, because the test ends its process. Returns
    /// the exit status of that process.
    fn ends_with(name: &str) -> std::process::ExitStatus {
        let program = std::env::current_exe().expect("cannot find the program of this test");
        let name = format!("memory::sigbus::tests::{name}");
        let mut command = std::process::Command::new(program);
        command.args([&name, "--exact", "--ignored", "--nocapture"]);
        let output = command.output().expect("cannot run the program");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(
            text.contains("running 1 test"),
            "the child process did not run exactly one test: {text}"
        );
        output.status
    }

    #[test]
    fn a_fault_outside_watched_memory_ends_the_process() {
        for name in [
            "child_process_reads_memory_that_is_no_longer_watched",
            "child_process_sends_sigbus_to_itself",
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
    fn child_process_reads_memory_that_is_no_longer_watched() {
        let mapping = Mapping::new(2);
        let lost = Arc::default();
        drop(mapping.watch(&lost));
        take_away(mapping.at(0), PAGE);
        mapping.read(0);
    }

    #[test]
    #[ignore = "ends its process: for a_fault_outside_watched_memory_ends_the_process"]
    fn child_process_sends_sigbus_to_itself() {
        let mapping = Mapping::new(2);
        let lost = Arc::default();
        let _watch = mapping.watch(&lost);
        let own = rustix::process::getpid();
        rustix::process::kill_process(own, rustix::process::Signal::BUS)
            .expect("cannot send the signal");
        // The thread that sent the signal waits here, because the kernel may deliver the signal to
        // any thread of the process.
        std::thread::sleep(std::time::Duration::from_secs(60));
    }
}
