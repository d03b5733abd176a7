// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Rings eventfds of a front end, its calls and error descriptors, without ever waiting.
//!
//! A write to an eventfd whose counter is full waits, unless O_NONBLOCK is set; that flag belongs to
//! the open file, which the front end shares and can change at any time. RWF_NOWAIT is refused for
//! eventfds. An io_uring write to one that is full stays in the ring, another with each call; and on
//! its way it looks at the flag and has the eventfd look at it again, so that whether it can wait in
//! between is the kernel's to promise, which it does not (400,000 writes did not, while another
//! thread changed the flag). The kernel itself rings eventfds without waiting, among others when an
//! operation of its AIO (io_submit(2)) is done and names one. So a ring is such an operation: a read
//! of nothing from /dev/null, done before the system call returns. What a full counter loses was
//! signalled already.
//!
//! System calls: io_submit; now and then io_getevents; at the start io_setup, and open of /dev/null.

use crate::util::log_limit::LogLimit;
use libc::{c_long, c_ulong};
use rustix::fs::{Mode, OFlags};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Operations whose completions nobody has taken. The host has 65,536 for all processes
/// (fs.aio-max-nr); a few save system calls to take them.
const EVENTS_MAX: usize = 128;

/// Threads that ring at the same time take each other's places; none does so this often.
const ATTEMPTS_MAX: usize = 10_000;

/// `struct iocb` of linux/aio_abi.h, where bytes are in the order of a little-endian machine.
#[repr(C)]
#[derive(Default)]
struct Iocb {
    data: u64,
    key: u32,
    rw_flags: u32,
    opcode: u16,
    priority: i16,
    fd: u32,
    buffer: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    eventfd: u32,
}

/// `struct io_event`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct IoEvent([u64; 4]);

const OPCODE_PREAD: u16 = 0;
const FLAG_EVENTFD: u32 = 1;

#[cfg(target_endian = "big")]
compile_error!("struct iocb has key and rw_flags the other way round");

/// A context of the kernel's AIO, which any thread may use.
struct Notifier {
    context: c_ulong,
    null: OwnedFd,
}

/// There is one for the process, and it goes with it.
static NOTIFIER: OnceLock<Notifier> = OnceLock::new();

/// Makes sure that [`ring`] can; to be called before anything is served.
///
/// # Errors
/// The kernel has no AIO, or all that it has is taken.
pub fn prepare() -> io::Result<()> {
    if NOTIFIER.get().is_none() {
        // If another thread was quicker, one context is too many, which is no harm.
        let _ = NOTIFIER.set(Notifier::new()?);
    }
    Ok(())
}

/// Interrupts that could not be delivered.
static LOST_INTERRUPTS: AtomicU64 = AtomicU64::new(0);

/// Limits log lines about them: a worker can lose one for each answer.
static LOST_LINES: LogLimit = LogLimit::const_default();

/// Interrupts that could not be delivered since the start.
pub fn lost_interrupts() -> u64 {
    LOST_INTERRUPTS.load(Ordering::Relaxed)
}

/// Rings an eventfd. It never waits, whatever others do with it. An interrupt that the kernel does not deliver is
/// counted and logged.
///
/// # Panics
/// Nobody has called [`prepare`].
pub fn notify(fd: &OwnedFd) {
    let notifier = NOTIFIER.get().expect("prepared before anything is served");
    if let Err(error) = notifier.notify(fd) {
        // Of an eventfd that is open this is want of memory. The front end's device looks again at
        // its deadline, and its driver goes on without answers.
        LOST_INTERRUPTS.fetch_add(1, Ordering::Relaxed);
        if let Some(left_out) = LOST_LINES.admit(Instant::now()) {
            tracing::error!(
                left_out,
                "an interrupt of a guest is lost, which it notices at its deadline: {error}"
            );
        }
    }
}

impl Notifier {
    fn new() -> io::Result<Notifier> {
        let null = rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        let mut context: c_ulong = 0;
        // SAFETY: the kernel writes a context's number to where the pointer says.
        let done = unsafe { libc::syscall(libc::SYS_io_setup, EVENTS_MAX as c_long, &mut context) };
        if done < 0 {
            let error = io::Error::last_os_error();
            return Err(io::Error::other(format!(
                "calls of guests need {EVENTS_MAX} operations of the kernel's AIO (io_setup: \
                 {error}); if others have taken all, raise fs.aio-max-nr"
            )));
        }
        Ok(Notifier { context, null })
    }

    fn notify(&self, fd: &OwnedFd) -> io::Result<()> {
        let mut operation = Iocb {
            opcode: OPCODE_PREAD,
            fd: self.null.as_raw_fd() as u32,
            flags: FLAG_EVENTFD,
            eventfd: fd.as_raw_fd() as u32,
            ..Iocb::default()
        };
        let mut last = io::Error::from_raw_os_error(libc::EAGAIN);
        for _ in 0..ATTEMPTS_MAX {
            let mut operations = [&raw mut operation];
            // SAFETY: the context lives as long as the process; the kernel reads one operation, which
            // reads nothing and is done before it returns.
            let done = unsafe {
                libc::syscall(
                    libc::SYS_io_submit,
                    self.context,
                    1 as c_long,
                    operations.as_mut_ptr(),
                )
            };
            if done == 1 {
                return Ok(());
            }
            last = io::Error::last_os_error();
            match last.raw_os_error() {
                // No completion has room.
                Some(libc::EAGAIN) => self.reap(),
                Some(libc::EINTR) => {}
                _ => break,
            }
        }
        Err(last)
    }

    /// Takes completions, which say nothing.
    fn reap(&self) {
        let mut events = [IoEvent::default(); EVENTS_MAX];
        // SAFETY: the kernel writes at most as many events as there is room for; no time is given,
        // and with a minimum of 0 it does not wait.
        unsafe {
            libc::syscall(
                libc::SYS_io_getevents,
                self.context,
                0 as c_long,
                EVENTS_MAX as c_long,
                events.as_mut_ptr(),
                std::ptr::null::<libc::timespec>(),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use std::sync::mpsc;
    use std::time::Duration;

    fn count(fd: &OwnedFd) -> u64 {
        let mut bytes = [0; 8];
        rustix::io::read(fd, &mut bytes).expect("signalled");
        u64::from_ne_bytes(bytes)
    }

    #[test]
    fn each_ring_counts_from_any_thread() {
        prepare().expect("AIO");
        let fd = eventfd(0, EventfdFlags::CLOEXEC).expect("eventfd");
        const CALLS: u64 = 20_000;
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| (0..CALLS).for_each(|_| notify(&fd)));
            }
        });
        assert_eq!(count(&fd), 3 * CALLS);
    }

    /// One test looks at the count of the whole process: no other one loses interrupts.
    #[test]
    fn lost_interrupts_are_counted() {
        prepare().expect("AIO");
        let null = rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
        let no_eventfd = null.expect("opened");
        let before = lost_interrupts();
        (0..100).for_each(|_| notify(&no_eventfd));
        assert_eq!(lost_interrupts() - before, 100);
        let fd = eventfd(0, EventfdFlags::CLOEXEC).expect("eventfd");
        notify(&fd);
        assert_eq!(
            (count(&fd), lost_interrupts() - before),
            (1, 100),
            "others arrive"
        );
    }

    /// As a front end can have it at any time: an ordinary write would wait for ever.
    #[test]
    fn ringing_never_waits() {
        prepare().expect("AIO");
        let fd = eventfd(0, EventfdFlags::CLOEXEC).expect("eventfd");
        rustix::io::write(&fd, &(u64::MAX - 1).to_ne_bytes()).expect("empty");
        let (sender, done) = mpsc::channel();
        std::thread::spawn(move || {
            (0..1000).for_each(|_| notify(&fd));
            sender.send(count(&fd)).expect("waited for");
        });
        let counted = done.recv_timeout(Duration::from_secs(30));
        assert!(counted.is_ok_and(|count| count >= u64::MAX - 1));
    }
}
