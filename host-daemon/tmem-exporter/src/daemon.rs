// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Asks the daemon for its figures (statistics), with a bound on time and size: a daemon that hangs
//! must not hang the exporter. The varlink library's client is not used, because it waits for an
//! answer without a time limit.

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use std::io::{Error, Read, Result, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};
use tmem_control::GetStats_Reply;

/// Longest time of a request. The daemon needs less for 1,024 VMs under load, and Prometheus
/// usually waits 10 s.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of bytes of an answer. The figures of 1,024 VMs take about 2 MiB.
const ANSWER_BYTES_MAX: usize = 16 << 20;

fn connect(socket: &Path) -> Result<UnixStream> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
    let stream = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
    // The time-out also bounds connect(), which blocks if a hanging daemon does not accept.
    sockopt::set_socket_timeout(&stream, sockopt::Timeout::Send, Some(TIMEOUT))?;
    rustix::net::connect(&stream, &SocketAddrUnix::new(socket)?)?;
    Ok(stream.into())
}

/// Requests all figures from the daemon and returns them.
///
/// # Errors
/// Returns an error if no process listens on the socket, if the answer is late, or if it is not a
/// valid answer of tmemd.
pub fn stats(socket: &Path) -> Result<GetStats_Reply> {
    let deadline = Instant::now() + TIMEOUT;
    let mut stream = connect(socket)?;
    stream.write_all(b"{\"method\":\"io.virtiotmem.Control.GetStats\",\"parameters\":{}}\0")?;
    let (mut answer, mut part) = (Vec::new(), vec![0; 64 << 10]);
    while answer.last() != Some(&0) {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() || answer.len() > ANSWER_BYTES_MAX {
            return Err(Error::other("its answer is late or too long"));
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut part)? {
            0 => return Err(Error::other("it closed the connection")),
            read => answer.extend_from_slice(&part[..read]),
        }
    }
    answer.pop();
    let mut answer: serde_json::Value = serde_json::from_slice(&answer)?;
    if let Some(error) = answer["error"].as_str() {
        return Err(Error::other(format!("it answered with the error {error}")));
    }
    Ok(serde_json::from_value(answer["parameters"].take())?)
}
