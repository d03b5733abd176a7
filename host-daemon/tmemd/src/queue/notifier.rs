// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Signals eventfds of a front end without blocking: call eventfds (interrupts) and error eventfds.
//!
//! A write to an eventfd whose counter is full blocks unless O_NONBLOCK is set. That flag belongs
//! to the open file, which the front end shares and can change at any time. The kernel refuses
//! RWF_NOWAIT for eventfds.
//!
//! io_uring does not help either. An io_uring write to a full eventfd stays in the ring, so each
//! further notification would add another one. io_uring also reads the flag before the eventfd
//! reads it again. The kernel therefore does not guarantee that the write cannot block in between.
//! (400,000 writes did not block while another thread changed the flag.)
//!
//! The kernel signals an eventfd without blocking when an AIO operation (io_submit(2)) that names
//! the eventfd completes. A notification is therefore an AIO operation: a read of 0 bytes from
//! /dev/null, which completes before the system call returns. If the counter is full, the kernel
//! does not increase it; the eventfd is then already signalled.
//!
//! All processes of a host share a limited number of AIO operations (fs.aio-max-nr), and many QEMUs
//! with aio=native can use all of them. The daemon needs one. If there is none, an io_uring that
//! signals its registered eventfd takes the place of AIO, see `notifier_ring.rs`.
//!
//! System calls: io_submit and sometimes io_getevents; at the start also io_setup and open of
//! /dev/null.

use crate::queue::notifier_ring::NotifierRing;
use crate::vm::state::Vm;
use libc::{c_long, c_ulong};
use rustix::fs::{Mode, OFlags};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Number of operations for which the AIO context is requested: the smallest number. The kernel
/// counts this number against fs.aio-max-nr, by default 65,536 for all processes of the host. It
/// fills at least a page with completions in any case, so a context has space for 127 or more.
const CONTEXT_EVENTS: c_long = 1;

/// Maximum number of completions that one system call discards. Discarding many completions at once
/// saves system calls.
const EVENTS_MAX: usize = 128;

/// Maximum number of attempts to send one notification. An attempt fails if other threads have used
/// up the free completions of the AIO context. In practice no thread needs nearly as many attempts.
const ATTEMPTS_MAX: usize = 10_000;

/// AIO operation: `struct iocb` of linux/aio_abi.h on a little-endian machine.
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

/// AIO completion: `struct io_event` of linux/aio_abi.h.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct IoEvent([u64; 4]);

const OPCODE_PREAD: u16 = 0;
const FLAG_EVENTFD: u32 = 1;

#[cfg(target_endian = "big")]
compile_error!("on a big-endian machine, struct iocb has rw_flags before key");

/// AIO context of the kernel, through which interrupts are sent. Any thread may use it.
struct Aio {
    context: c_ulong,
    null: OwnedFd,
}

/// Kernel interface through which interrupts are sent.
enum Notifier {
    Aio(Aio),
    Ring(Box<NotifierRing>),
}

/// The process's only notifier. The kernel destroys its context or ring when the process ends.
static NOTIFIER: OnceLock<Notifier> = OnceLock::new();

/// Creates the AIO context or the io_uring that [`interrupt`] uses. The daemon must call this
/// function before it serves a queue.
///
/// # Errors
/// The kernel has no AIO, or other processes use all AIO operations that the host permits. Also, the
/// kernel does not permit io_uring.
pub fn prepare() -> io::Result<()> {
    if NOTIFIER.get().is_none() {
        // If another thread has created a notifier meanwhile, the one that is created here is
        // dropped. A dropped AIO context remains unused, which is harmless.
        let _ = NOTIFIER.set(Notifier::new(Aio::new())?);
    }
    Ok(())
}

/// Number of interrupts since the start that the kernel did not deliver.
static LOST_INTERRUPTS: AtomicU64 = AtomicU64::new(0);

/// Returns the number of interrupts since the start that the kernel did not deliver.
pub fn lost_interrupts() -> u64 {
    LOST_INTERRUPTS.load(Ordering::Relaxed)
}

/// Signals an eventfd of a VM's front end. The call never blocks, whatever other processes do with
/// the eventfd. If the kernel does not deliver the interrupt, the function counts it and logs the
/// VM's name. The guest's driver then waits until its deadline.
///
/// # Panics
/// [`prepare`] was not called.
pub fn interrupt(vm: &Vm, fd: &OwnedFd) {
    if let Err(error) = notify(fd) {
        vm.warn(format_args!(
            "an interrupt is lost: {error}; the guest continues at its driver's deadline"
        ));
    }
}

/// Signals an eventfd. Counts a failure as a lost interrupt.
///
/// # Errors
/// The kernel did not deliver the interrupt. For an open eventfd the reason is a lack of memory.
fn notify(fd: &OwnedFd) -> io::Result<()> {
    let notifier = NOTIFIER
        .get()
        .expect("notifier::prepare was not called before a queue is served");
    notifier.notify(fd).inspect_err(|_| {
        LOST_INTERRUPTS.fetch_add(1, Ordering::Relaxed);
    })
}

impl Notifier {
    /// Returns a notifier with the AIO context, or with an io_uring if there is no context.
    fn new(aio: io::Result<Aio>) -> io::Result<Notifier> {
        let error = match aio {
            Ok(aio) => return Ok(Notifier::Aio(aio)),
            Err(error) => error,
        };
        let ring = NotifierRing::new().map_err(|ring| {
            io::Error::other(format!(
                "interrupts of guests need the kernel's AIO (io_setup: {error}) or io_uring \
                 ({ring}). If other processes use all operations of AIO (sysctl fs.aio-nr), raise \
                 fs.aio-max-nr"
            ))
        })?;
        tracing::warn!(
            "interrupts of guests use io_uring, which takes more time, because the kernel's AIO is \
             not available (io_setup: {error}). If other processes use all of its operations \
             (sysctl fs.aio-nr), raise fs.aio-max-nr and restart the daemon"
        );
        Ok(Notifier::Ring(Box::new(ring)))
    }

    fn notify(&self, fd: &OwnedFd) -> io::Result<()> {
        match self {
            Notifier::Aio(aio) => aio.signal(fd),
            Notifier::Ring(ring) => ring.signal(fd),
        }
    }
}

impl Aio {
    fn new() -> io::Result<Aio> {
        let null = rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
            .map_err(|error| io::Error::other(format!("/dev/null: {error}")))?;
        let mut context: c_ulong = 0;
        // SAFETY: the kernel writes the number of the new context to `context`, which is valid for
        // the write.
        match unsafe { libc::syscall(libc::SYS_io_setup, CONTEXT_EVENTS, &mut context) } {
            0 => Ok(Aio { context, null }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn signal(&self, fd: &OwnedFd) -> io::Result<()> {
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
            // SAFETY: the context lives as long as the process. The kernel reads one AIO operation,
            // which reads no data and completes before the call returns.
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
                // EAGAIN means that the AIO context has no space for another completion.
                Some(libc::EAGAIN) => self.reap(),
                Some(libc::EINTR) => {}
                _ => break,
            }
        }
        Err(last)
    }

    /// Discards completions from the AIO context. No code needs their content.
    fn reap(&self) {
        let mut events = [IoEvent::default(); EVENTS_MAX];
        // SAFETY: the kernel writes at most `EVENTS_MAX` events, for which the array has space. The
        // call does not wait, because its minimum number of events is 0.
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
    use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};
    use std::sync::mpsc;
    use std::time::{Duration, Instant};
    use tmem_model::{Missing, skipped};

    fn count(fd: &OwnedFd) -> u64 {
        let mut bytes = [0; 8];
        rustix::io::read(fd, &mut bytes).expect("the eventfd is not signalled");
        u64::from_ne_bytes(bytes)
    }

    /// Returns a notifier of each kind that this machine permits.
    fn notifiers() -> Vec<Notifier> {
        let mut notifiers = vec![Notifier::Aio(
            Aio::new().expect("cannot create the kernel's AIO context"),
        )];
        if let Err(error) = NotifierRing::new() {
            skipped(Missing::IoUring, error);
            return notifiers;
        }
        // On a host whose AIO is used up, io_setup(2) fails with EAGAIN.
        let without_aio = Notifier::new(Err(io::Error::from_raw_os_error(libc::EAGAIN)));
        notifiers.push(without_aio.expect("io_uring does not take the place of AIO"));
        notifiers
    }

    #[test]
    fn concurrent_notifications_all_add_to_the_eventfd() {
        for notifier in &notifiers() {
            let fd = eventfd(0, EventfdFlags::CLOEXEC).expect("cannot create an eventfd");
            const CALLS: u64 = 20_000;
            let begun = Instant::now();
            std::thread::scope(|scope| {
                for _ in 0..3 {
                    scope.spawn(|| {
                        (0..CALLS).for_each(|_| {
                            notifier
                                .notify(&fd)
                                .expect("the notifier did not signal the eventfd")
                        })
                    });
                }
            });
            println!("{} notifications took {:?}", 3 * CALLS, begun.elapsed());
            assert_eq!(count(&fd), 3 * CALLS);
        }
    }

    /// Signalling must not block if the eventfd's counter is full and O_NONBLOCK is not set. A
    /// front end can cause this state at any time. A plain write to the eventfd would block for
    /// ever.
    #[test]
    fn notifying_a_full_eventfd_does_not_block() {
        for notifier in notifiers() {
            let fd = eventfd(0, EventfdFlags::CLOEXEC).expect("cannot create an eventfd");
            rustix::io::write(&fd, &(u64::MAX - 1).to_ne_bytes())
                .expect("the eventfd's counter does not accept the value");
            let (sender, done) = mpsc::channel();
            std::thread::spawn(move || {
                (0..1000).for_each(|_| {
                    notifier
                        .notify(&fd)
                        .expect("the notifier did not signal the eventfd")
                });
                sender
                    .send(count(&fd))
                    .expect("the receiver of the message was dropped");
            });
            let counted = done.recv_timeout(Duration::from_secs(30));
            assert!(counted.is_ok_and(|count| count >= u64::MAX - 1));
        }
    }

    /// Without AIO and without io_uring, the daemon does not start. Its message names both reasons.
    #[test]
    fn without_aio_and_io_uring_the_message_names_the_remedy() {
        let thread = std::thread::spawn(|| {
            let rules = [(libc::SYS_io_uring_setup, Vec::new())].into();
            let filter = SeccompFilter::new(
                rules,
                SeccompAction::Allow,
                SeccompAction::Errno(libc::EPERM as u32),
                std::env::consts::ARCH
                    .try_into()
                    .expect("unknown architecture"),
            );
            let filter: BpfProgram = filter
                .and_then(TryInto::try_into)
                .expect("cannot compile the filter");
            seccompiler::apply_filter(&filter).expect("cannot apply the filter");
            Notifier::new(Err(io::Error::from_raw_os_error(libc::EAGAIN)))
                .err()
                .expect("a notifier was created without AIO and io_uring")
                .to_string()
        });
        let text = thread.join().expect("the thread panicked");
        for part in ["io_setup", "io_uring", "fs.aio-max-nr"] {
            assert!(text.contains(part), "the message lacks {part:?}: {text}");
        }
    }
}
