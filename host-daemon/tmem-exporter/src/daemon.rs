// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Requests the daemon's figures (statistics) with a limit on time and size, so that a daemon that
//! hangs does not hang the exporter. The exporter does not use the varlink library's client,
//! because that client waits for an answer without a time limit.

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use std::io::{Error, Read, Result, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};
use tmem_control::GetStats_Reply;

/// Longest time that the exporter waits for the daemon's figures. The daemon needs less for 1,024
/// VMs under load, and Prometheus usually waits 10 s.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of bytes of the daemon's answer. The figures of 1,024 VMs take about 2 MiB.
const ANSWER_BYTES_MAX: usize = 16 << 20;

fn connect(socket: &Path) -> Result<UnixStream> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
    let stream = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
    // The time limit for sending also bounds connect(), which blocks if a daemon that hangs accepts
    // no connections.
    sockopt::set_socket_timeout(&stream, sockopt::Timeout::Send, Some(TIMEOUT))?;
    rustix::net::connect(&stream, &SocketAddrUnix::new(socket)?)?;
    Ok(stream.into())
}

/// Requests all figures from the daemon and returns them.
///
/// # Errors
/// Returns an error if no process listens on the socket, or if the answer is late or too long. An
/// answer that is not a valid answer of tmemd is an error, too.
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
