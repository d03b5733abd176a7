// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Connects a command to the daemon, and translates the daemon's refusals for the user.

use crate::exit::{Code, Failure};
use std::os::unix::net::UnixStream;
use std::path::Path;
use tmem_control as api;

/// Connects to the daemon. A plain connect() comes first, because the library's error does not say
/// what to do.
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

/// Translates an error of a call to the daemon.
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
            format!("the socket {at} is read-only: name the other one with --socket"),
            Code::Denied,
        ),
        api::ErrorKind::BadSize(Some(args)) => (
            format!(
                "a pool cannot have {} bytes: {}",
                args.size_bytes, args.reason
            ),
            Code::Refused,
        ),
        _ if api::was_shut(error) => (
            format!(
                "the daemon at {at} has too many clients, or refuses this user: its log has the reason. \
                 Try again, or use its other socket"
            ),
            Code::Unreachable,
        ),
        _ if is_unknown(error) => (
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
                format!("the daemon at {at} refused: {error}"),
                Code::Refused,
            ),
        },
    };
    Failure(what, code)
}

fn is_unknown(error: &api::Error) -> bool {
    let kind = error.source_varlink_kind();
    matches!(kind, Some(varlink::ErrorKind::MethodNotFound(_)))
}
