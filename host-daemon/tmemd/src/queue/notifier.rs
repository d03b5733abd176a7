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
//! System calls: io_submit and sometimes io_getevents; at the start also io_setup and open of
//! /dev/null.

use crate::vm::state::Vm;
use libc::{c_long, c_ulong};
use rustix::fs::{Mode, OFlags};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Maximum number of completions that stay in the AIO context before the daemon discards them.
/// Discarding many completions at once saves system calls. By default, the AIO contexts of all
/// processes of the host together may have space for 65,536 completions (fs.aio-max-nr).
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
struct Notifier {
    context: c_ulong,
    null: OwnedFd,
}

/// The process's only AIO context. The kernel destroys it when the process ends.
static NOTIFIER: OnceLock<Notifier> = OnceLock::new();

/// Creates the AIO context that [`interrupt`] uses. The daemon must call this function before it
/// serves a queue.
///
/// # Errors
/// The kernel has no AIO, or other processes use all AIO operations that the host permits.
pub fn prepare() -> io::Result<()> {
    if NOTIFIER.get().is_none() {
        // If another thread has created a context meanwhile, the context that is created here
        // remains unused, which is harmless.
        let _ = NOTIFIER.set(Notifier::new()?);
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
    fn new() -> io::Result<Notifier> {
        let null = rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        let mut context: c_ulong = 0;
        // SAFETY: the kernel writes the number of the new context to `context`, which is valid for
        // the write.
        let done = unsafe { libc::syscall(libc::SYS_io_setup, EVENTS_MAX as c_long, &mut context) };
        if done < 0 {
            let error = io::Error::last_os_error();
            return Err(io::Error::other(format!(
                "interrupts of guests need {EVENTS_MAX} operations of the kernel's AIO (io_setup: \
                 {error}). If other processes use all operations, raise fs.aio-max-nr"
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
    use std::sync::mpsc;
    use std::time::Duration;

    fn count(fd: &OwnedFd) -> u64 {
        let mut bytes = [0; 8];
        rustix::io::read(fd, &mut bytes).expect("the eventfd is not signalled");
        u64::from_ne_bytes(bytes)
    }

    #[test]
    fn concurrent_notifications_all_add_to_the_eventfd() {
        prepare().expect("cannot create the kernel's AIO context");
        let fd = eventfd(0, EventfdFlags::CLOEXEC).expect("cannot create an eventfd");
        const CALLS: u64 = 20_000;
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    (0..CALLS)
                        .for_each(|_| notify(&fd).expect("the notifier did not signal the eventfd"))
                });
            }
        });
        assert_eq!(count(&fd), 3 * CALLS);
    }

    /// Signalling must not block if the eventfd's counter is full and O_NONBLOCK is not set. A
    /// front end can cause this state at any time. A plain write to the eventfd would block for
    /// ever.
    #[test]
    fn notifying_a_full_eventfd_does_not_block() {
        prepare().expect("cannot create the kernel's AIO context");
        let fd = eventfd(0, EventfdFlags::CLOEXEC).expect("cannot create an eventfd");
        rustix::io::write(&fd, &(u64::MAX - 1).to_ne_bytes())
            .expect("the eventfd's counter does not accept the value");
        let (sender, done) = mpsc::channel();
        std::thread::spawn(move || {
            (0..1000).for_each(|_| notify(&fd).expect("the notifier did not signal the eventfd"));
            sender
                .send(count(&fd))
                .expect("the receiver of the message was dropped");
        });
        let counted = done.recv_timeout(Duration::from_secs(30));
        assert!(counted.is_ok_and(|count| count >= u64::MAX - 1));
    }
}
