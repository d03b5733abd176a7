// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Connects a command to the daemon, and translates the daemon's refusals for the user.

use crate::exit::{Code, Failure};
use crate::reach::Reach;
use std::os::unix::net::UnixStream;
use std::path::Path;
use tmem_control as api;
use tmem_control::VarlinkClientInterface;

/// Connects to the daemon's control socket. The function first calls connect() itself, because an
/// error of the varlink library does not tell the user what to do.
pub fn connect(socket: &Path) -> Result<api::VarlinkClient, Failure> {
    let at = socket.display();
    let failure = |what: String| Failure(what, Code::Unreachable);
    if let Err(error) = UnixStream::connect(socket) {
        return Err(match error.kind() {
            std::io::ErrorKind::NotFound => failure(format!(
                "there is no control socket {at}: start tmemd, or name its socket with --socket"
            )),
            std::io::ErrorKind::ConnectionRefused => failure(format!(
                "no process listens on the control socket {at}: tmemd was killed; start it again"
            )),
            std::io::ErrorKind::PermissionDenied => Failure(
                format!(
                    "no permission for the control socket {at}: join its group, or use the read-only \
                     one with --socket"
                ),
                Code::Denied,
            ),
            _ => failure(format!(
                "cannot connect to the control socket {at}: {error}"
            )),
        });
    }
    api::connect(socket).map_err(|error| {
        failure(format!(
            "cannot connect to the control socket {at}: {error}"
        ))
    })
}

/// Converts an error reply of the daemon to a message for the user, with a remedy, and an exit
/// code.
pub fn refused(socket: &Path, error: &api::Error) -> Failure {
    let at = socket.display();
    let (what, code) = match error.kind() {
        api::ErrorKind::NoSuchVm(args) => (
            format!(
                "the daemon has no VM {:?}: see tmemctl list",
                args.as_ref().map_or("", |args| &args.name)
            ),
            Code::NotFound,
        ),
        api::ErrorKind::ReadOnlySocket(_) => (
            format!("the socket {at} is read-only: name the control socket with --socket"),
            Code::Denied,
        ),
        api::ErrorKind::BadSize(Some(args)) => (
            format!(
                "a pool cannot have {} bytes: {}",
                args.size_bytes, args.reason
            ),
            Code::Refused,
        ),
        _ if api::is_connection_closed(error) => (
            format!(
                "the daemon at {at} has too many clients, or refuses this user: its log has the reason. \
                 Try again, or name the daemon's other control socket with --socket: by default, it has \
                 the sockets control and control-ro in /run/virtio-tmem"
            ),
            Code::Unreachable,
        ),
        _ if api::is_unknown(error) => (
            format!(
                "the daemon at {at} is older than this tmemctl and does not know the request: see \
                 tmemctl version"
            ),
            Code::Failed,
        ),
        _ => match error.source_varlink_kind() {
            Some(kind @ varlink::ErrorKind::Io(_)) => (
                format!("the daemon at {at} did not answer: {kind}"),
                Code::Unreachable,
            ),
            Some(kind) => (
                format!("the daemon at {at} gave an invalid answer: {kind}"),
                Code::Failed,
            ),
            None => (
                format!("the daemon at {at} refused the request: {error}"),
                Code::Refused,
            ),
        },
    };
    Failure(what, code)
}

/// Gets the statistics of the daemon, the pool and all VMs or, with `vm`, of that VM only.
pub fn stats(reach: &Reach, vm: Option<String>) -> Result<api::GetStats_Reply, Failure> {
    let mut client = connect(&reach.socket)?;
    let reply = client.get_stats(vm).call();
    reply.map_err(|error| refused(&reach.socket, &error))
}

/// Asks the daemon whether it supports retained pages (pages that a get leaves in the pool).
#[cfg(feature = "libvirt")]
pub fn knows_retained_pages(socket: &Path) -> Result<bool, Failure> {
    let knows = api::knows_retained_pages(&mut connect(socket)?);
    knows.map_err(|error| refused(socket, &error))
}

#[cfg(all(test, feature = "libvirt"))]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixListener;

    /// Returns what [`knows_retained_pages`] returns if the daemon replies `answer`. The daemon is
    /// a thread of the test.
    fn answered(answer: &'static str) -> Result<bool, Failure> {
        let directory = tempfile::tempdir().expect("cannot create a temporary directory");
        let socket = directory.path().join("control");
        let listener = UnixListener::bind(&socket).expect("cannot bind the socket");
        let daemon = std::thread::spawn(move || {
            let mut call = Vec::new();
            // tmemctl first connects without a request, to test whether a process listens. The loop
            // skips that connection.
            let stream = loop {
                let (stream, _) = listener.accept().expect("cannot accept a connection");
                BufReader::new(&stream)
                    .read_until(0, &mut call)
                    .expect("cannot read the call");
                if !call.is_empty() {
                    break stream;
                }
            };
            let answer = format!("{answer}\0");
            (&stream)
                .write_all(answer.as_bytes())
                .expect("cannot write the answer");
            String::from_utf8(call).expect("the call is not UTF-8")
        });
        let knows = knows_retained_pages(&socket);
        let call = daemon.join().expect("the thread panicked");
        assert!(call.contains("io.virtiotmem.Control.GetFeatures"), "{call}");
        knows
    }

    #[test]
    fn retained_pages_are_supported_only_if_the_daemon_lists_the_feature() {
        let known = r#"{"parameters":{"features":["OTHER","VIRTIO_TMEM_F_RETAIN"]}}"#;
        assert!(answered(known).is_ok_and(|known| known));
        let other = r#"{"parameters":{"features":["VIRTIO_TMEM_F_LATENCIES"]}}"#;
        assert!(answered(other).is_ok_and(|known| !known));
        let old = r#"{"error":"org.varlink.service.MethodNotFound","parameters":{"method":"GetFeatures"}}"#;
        assert!(answered(old).is_ok_and(|known| !known));
        let failed = r#"{"error":"org.varlink.service.PermissionDenied"}"#;
        assert!(answered(failed).is_err());
    }
}
