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

use libc::{c_long, c_ulong};
use rustix::fs::{Mode, OFlags};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Operations whose completions nobody has taken. The host has 65,536 for all processes
/// (fs.aio-max-nr); a few save system calls to take them.
const EVENTS_MAX: usize = 128;

/// Threads that ring at the same time take each other's places; none does so this often.
const ATTEMPTS_MAX: usize = 10_000;

/// `struct iocb` of linux/aio_abi.h, where bytes are in the order of a little-endian machine.
#[repr(C)]
#[derive(Default)]
struct Operation {
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
struct Event([u64; 4]);

const OPCODE_PREAD: u16 = 0;
const FLAG_EVENTFD: u32 = 1;

#[cfg(target_endian = "big")]
compile_error!("struct iocb has key and rw_flags the other way round");

/// A context of the kernel's AIO, which any thread may use.
struct Bell {
    context: c_ulong,
    null: OwnedFd,
}

/// There is one for the process, and it goes with it.
static BELL: OnceLock<Bell> = OnceLock::new();

/// Makes sure that [`ring`] can; to be called before anything is served.
///
/// # Errors
/// The kernel has no AIO, or all that it has is taken.
pub fn prepare() -> io::Result<()> {
    if BELL.get().is_none() {
        // If another thread was quicker, one context is too many, which is no harm.
        let _ = BELL.set(Bell::new()?);
    }
    Ok(())
}

/// Interrupts that could not be delivered.
static LOST: AtomicU64 = AtomicU64::new(0);

/// Interrupts that could not be delivered since the start.
pub fn lost() -> u64 {
    LOST.load(Ordering::Relaxed)
}

/// Signals an eventfd. It never waits, whatever others do with it. An interrupt that the kernel does not deliver is
/// counted. The caller logs it: see [`Vm::interrupt`](crate::vm::Vm::interrupt).
///
/// # Errors
/// The kernel did not deliver the interrupt. Of an eventfd that is open, the reason is want of memory.
///
/// # Panics
/// Nobody has called [`prepare`].
pub fn ring(fd: &OwnedFd) -> io::Result<()> {
    let bell = BELL.get().expect("prepared before anything is served");
    bell.ring(fd).inspect_err(|_| {
        LOST.fetch_add(1, Ordering::Relaxed);
    })
}

impl Bell {
    fn new() -> io::Result<Bell> {
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
        Ok(Bell { context, null })
    }

    fn ring(&self, fd: &OwnedFd) -> io::Result<()> {
        let mut operation = Operation {
            opcode: OPCODE_PREAD,
            fd: self.null.as_raw_fd() as u32,
            flags: FLAG_EVENTFD,
            eventfd: fd.as_raw_fd() as u32,
            ..Operation::default()
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
                Some(libc::EAGAIN) => self.forget(),
                Some(libc::EINTR) => {}
                _ => break,
            }
        }
        Err(last)
    }

    /// Takes completions, which say nothing.
    fn forget(&self) {
        let mut events = [Event::default(); EVENTS_MAX];
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
        const RINGS: u64 = 20_000;
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| (0..RINGS).for_each(|_| ring(&fd).expect("rung")));
            }
        });
        assert_eq!(count(&fd), 3 * RINGS);
    }

    /// As a front end can have it at any time: an ordinary write would wait for ever.
    #[test]
    fn ringing_never_waits() {
        prepare().expect("AIO");
        let fd = eventfd(0, EventfdFlags::CLOEXEC).expect("eventfd");
        rustix::io::write(&fd, &(u64::MAX - 1).to_ne_bytes()).expect("empty");
        let (sender, done) = mpsc::channel();
        std::thread::spawn(move || {
            (0..1000).for_each(|_| ring(&fd).expect("rung"));
            sender.send(count(&fd)).expect("waited for");
        });
        let counted = done.recv_timeout(Duration::from_secs(30));
        assert!(counted.is_ok_and(|count| count >= u64::MAX - 1));
    }
}
