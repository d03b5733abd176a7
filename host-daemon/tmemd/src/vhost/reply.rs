// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sends the replies to vhost-user messages without sendmsg(2), which could pass file descriptors.
//!
//! seccomp sees the arguments of a system call, but not the `struct msghdr` that an argument of
//! sendmsg(2) points to. A filter that allows sendmsg(2) therefore also allows `SCM_RIGHTS`. With
//! it, a thread that an attacker has taken over could pass the memory of one VM to the QEMU of
//! another. It would not help to allow the call to connection threads only, because all threads
//! share their memory. The sandbox therefore allows sendmsg(2) to no thread.
//!
//! Only the vhost crate needs sendmsg(2): it sends replies through vmm-sys-util, and they never
//! carry a descriptor. Neither crate lets its caller choose another system call. Therefore this
//! file defines the C symbol `sendmsg` in the daemon itself, and the linker prefers this definition
//! to libc's. The function here sends a message without control data with sendto(2). It sends every
//! other message with sendmsg(2), which the sandbox refuses.
//!
//! Two crates of this program call the symbol. vmm-sys-util sends replies. tracing-journald sends
//! log lines that are too long for a datagram, and passes them in a memfd. The standard library
//! sends log lines with sendto(2). libc's own code does not use the symbol. The rings of io_uring
//! are restricted to operations that send nothing (`queue/uring.rs`). POSIX permits sendmsg() in
//! signal handlers, so the function here allocates nothing and takes no lock.

use libc::{c_int, iovec, msghdr};
use std::{ptr, slice};

/// Maximum total length in bytes of a message of several parts that is sent with sendto(2): twice
/// the longest vhost-user reply. A longer message is passed to sendmsg(2).
const MESSAGE_BYTES_MAX: usize = 8 << 10;

/// Sends a message as sendmsg(2) does, but with sendto(2) if the message carries no control data.
///
/// # Safety
/// `message` must be valid as for libc's sendmsg().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> isize {
    // SAFETY: the caller promises a valid message.
    let (header, parts) = unsafe { (&*message, parts(&*message)) };
    let mut buffer = [0u8; MESSAGE_BYTES_MAX];
    // SAFETY: each part is readable, because the caller of this function promises a valid message.
    let data = unsafe { join(parts, &mut buffer) };
    let (Some((data, bytes)), true) = (data, header.msg_controllen == 0) else {
        // SAFETY: the caller promises a valid message.
        return unsafe { libc::syscall(libc::SYS_sendmsg, fd, message, flags) as isize };
    };
    let (to, to_bytes) = (header.msg_name.cast_const().cast(), header.msg_namelen);
    // SAFETY: the data is in the message or in `buffer`, and the caller promises that the address
    // is valid.
    unsafe { libc::sendto(fd, data.cast(), bytes, flags, to, to_bytes) }
}

/// Returns address and length of the joined bytes of all parts. Does not copy a single part. Copies
/// several parts to `buffer`, and returns None if they do not fit into it.
///
/// # Safety
/// Each part must point to as many readable bytes as its length says.
unsafe fn join(
    parts: &[iovec],
    buffer: &mut [u8; MESSAGE_BYTES_MAX],
) -> Option<(*const u8, usize)> {
    match parts {
        [] => Some((ptr::null(), 0)),
        [part] => Some((part.iov_base.cast_const().cast(), part.iov_len)),
        _ => {
            let mut bytes = 0;
            for part in parts.iter().filter(|part| part.iov_len > 0) {
                let end = part.iov_len.checked_add(bytes)?;
                // SAFETY: the caller promises that the part is readable.
                let from = unsafe { slice::from_raw_parts(part.iov_base.cast(), part.iov_len) };
                buffer.get_mut(bytes..end)?.copy_from_slice(from);
                bytes = end;
            }
            Some((buffer.as_ptr(), bytes))
        }
    }
}

/// Returns the parts of a message as a slice.
///
/// # Safety
/// The message must be valid as for libc's sendmsg().
unsafe fn parts(message: &msghdr) -> &[iovec] {
    // The type of `msg_iovlen` differs between C libraries.
    #[allow(clippy::unnecessary_cast, reason = "musl has an int there")]
    match message.msg_iovlen as usize {
        0 => &[],
        // SAFETY: the caller promises a valid message.
        count => unsafe { slice::from_raw_parts(message.msg_iov, count) },
    }
}

#[cfg(test)]
mod tests {
    use super::MESSAGE_BYTES_MAX;
    use rustix::event::{EventfdFlags, eventfd};
    use std::fs::File;
    use std::io::Read;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;
    use vmm_sys_util::sock_ctrl_msg::ScmSocket;

    #[test]
    fn messages_of_any_length_in_any_number_of_parts_arrive_complete() {
        const LONG: usize = MESSAGE_BYTES_MAX + 1;
        let (left, mut right) = UnixStream::pair().expect("cannot create a socket pair");
        let long = vec![7; LONG];
        let messages: [&[&[u8]]; 5] = [
            &[],
            &[b"one"],
            &[&long],
            &[&long[..LONG / 2], &long[..LONG - LONG / 2 - 1]],
            &[&long[..LONG / 2], b"x", &long],
        ];
        for parts in messages {
            let sent = parts.concat();
            let bytes = left
                .send_with_fds(parts, &[])
                .expect("cannot send the message");
            assert_eq!(bytes, sent.len());
            let mut received = vec![0; bytes];
            right
                .read_exact(&mut received)
                .expect("cannot receive the message");
            assert_eq!(received, sent);
        }
    }

    /// Outside the sandbox, the replaced `sendmsg` still passes descriptors, because tests that
    /// link the daemon send descriptors themselves.
    #[test]
    fn sent_bytes_and_descriptors_arrive_complete() {
        let (left, mut right) = UnixStream::pair().expect("cannot create a socket pair");
        let parts: [&[u8]; 3] = [b"head", b"", b"body"];
        assert_eq!(
            left.send_with_fds(&parts, &[])
                .expect("cannot send the message"),
            8
        );
        let mut read = [0; 8];
        right
            .read_exact(&mut read)
            .expect("cannot receive the bytes");
        assert_eq!(&read, b"headbody");
        let passed = eventfd(7, EventfdFlags::CLOEXEC).expect("cannot create an eventfd");
        let sent = left.send_with_fd(&b"x"[..], passed.as_raw_fd());
        assert_eq!(sent.expect("cannot send the reply"), 1);
        let received: (usize, Option<File>) = right
            .recv_with_fd(&mut read)
            .expect("cannot receive the message");
        let mut count = [0; 8];
        let mut file = received.1.expect("the message has no descriptor");
        file.read_exact(&mut count)
            .expect("cannot read the eventfd");
        assert_eq!(u64::from_ne_bytes(count), 7);
    }

    #[test]
    fn sending_to_a_closed_socket_returns_an_error_without_sigpipe() {
        let (left, right) = UnixStream::pair().expect("cannot create a socket pair");
        drop(right);
        let error = left
            .send_with_fds(&[&b"x"[..]], &[])
            .expect_err("a message was sent to a closed socket");
        assert_eq!(error.errno(), libc::EPIPE);
    }
}
