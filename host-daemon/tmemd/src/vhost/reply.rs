// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sends the replies to vhost-user messages without sendmsg(2), which could pass file descriptors.
//!
//! seccomp sees the arguments of a system call, but not the `struct msghdr` that one of them points to. So a
//! filter that allows sendmsg(2) also allows `SCM_RIGHTS`: a thread that an attacker has taken over could hand the
//! memory of one VM to the QEMU of another. The sandbox therefore allows sendmsg(2) to no thread, and only the
//! vhost crate needs it, through vmm-sys-util, for replies that never carry a descriptor. Neither crate lets its
//! caller choose the system call. This file defines the C symbol `sendmsg` in the daemon itself, where the linker
//! prefers it to libc's: a message without control data becomes a sendto(2), every other one remains a sendmsg(2),
//! which the sandbox refuses.

use libc::{c_int, iovec, msghdr};
use std::slice;

/// Longest message that is copied to be sent: far more than the longest vhost-user reply, which has 4 KiB.
const MESSAGE_BYTES_MAX: usize = 64 << 10;

/// sendmsg(2), by sendto(2) if the message carries no control data.
///
/// # Safety
/// `message` is valid as for libc's sendmsg().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> isize {
    // SAFETY: as the caller says.
    let (header, parts) = unsafe { (&*message, parts(&*message)) };
    let bytes: usize = parts.iter().map(|part| part.iov_len).sum();
    if header.msg_controllen != 0 || bytes > MESSAGE_BYTES_MAX {
        // SAFETY: as the caller says.
        return unsafe { libc::syscall(libc::SYS_sendmsg, fd, message, flags) as isize };
    }
    let mut data: Vec<u8> = Vec::with_capacity(bytes);
    for part in parts.iter().filter(|part| part.iov_len > 0) {
        // SAFETY: each part is that many readable bytes, as the caller says.
        data.extend_from_slice(unsafe {
            slice::from_raw_parts(part.iov_base.cast(), part.iov_len)
        });
    }
    let (to, to_bytes) = (header.msg_name.cast_const().cast(), header.msg_namelen);
    // SAFETY: the buffer is alive, and the address is as the caller says.
    unsafe { libc::sendto(fd, data.as_ptr().cast(), bytes, flags, to, to_bytes) }
}

/// The parts of the message.
///
/// # Safety
/// The message is valid as for libc's sendmsg().
unsafe fn parts(message: &msghdr) -> &[iovec] {
    // The type of the number differs between C libraries.
    #[allow(clippy::unnecessary_cast, reason = "musl has an int there")]
    match message.msg_iovlen as usize {
        0 => &[],
        // SAFETY: as the caller says.
        count => unsafe { slice::from_raw_parts(message.msg_iov, count) },
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};
    use std::fs::File;
    use std::io::Read;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;
    use vmm_sys_util::sock_ctrl_msg::ScmSocket;

    /// A message of several parts arrives whole, and a descriptor still passes where no sandbox forbids it: tests
    /// that link the daemon send descriptors of their own.
    #[test]
    fn messages_arrive_as_by_libc() {
        let (left, mut right) = UnixStream::pair().expect("a pair");
        let parts: [&[u8]; 3] = [b"head", b"", b"body"];
        assert_eq!(left.send_with_fds(&parts, &[]).expect("sent"), 8);
        let mut read = [0; 8];
        right.read_exact(&mut read).expect("received");
        assert_eq!(&read, b"headbody");
        let passed = eventfd(7, EventfdFlags::CLOEXEC).expect("eventfd");
        let sent = left.send_with_fd(&b"x"[..], passed.as_raw_fd());
        assert_eq!(sent.expect("sent"), 1);
        let received: (usize, Option<File>) = right.recv_with_fd(&mut read).expect("received");
        let mut count = [0; 8];
        let mut file = received.1.expect("a descriptor");
        file.read_exact(&mut count).expect("the eventfd");
        assert_eq!(u64::from_ne_bytes(count), 7);
    }

    #[test]
    fn a_closed_peer_is_an_error_and_no_signal() {
        let (left, right) = UnixStream::pair().expect("a pair");
        drop(right);
        let error = left.send_with_fds(&[&b"x"[..]], &[]).expect_err("closed");
        assert_eq!(error.errno(), libc::EPIPE);
    }
}
