// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Connects a command to the daemon, and translates the daemon's refusals for the user.

use crate::Failure;
use std::os::unix::net::UnixStream;
use std::path::Path;
use tmem_control as api;

/// Connects to the daemon. A plain connect() comes first, because the library's error does not say
/// what to do.
pub fn connect(socket: &Path) -> Result<api::VarlinkClient, Failure> {
    let at = socket.display();
    let failure = |what: String| Failure(what, 3);
    if let Err(error) = UnixStream::connect(socket) {
        return Err(failure(match error.kind() {
            std::io::ErrorKind::NotFound => format!(
                "there is no control socket {at}: start tmemd, or name its socket with --socket"
            ),
            std::io::ErrorKind::ConnectionRefused => format!(
                "nobody listens on the control socket {at}: tmemd was killed; start it again"
            ),
            std::io::ErrorKind::PermissionDenied => format!(
                "no permission for the control socket {at}: join its group, or use the read-only \
                 one with --socket"
            ),
            _ => format!("cannot connect to the control socket {at}: {error}"),
        }));
    }
    api::connect(socket).map_err(|error| {
        failure(format!(
            "cannot connect to the control socket {at}: {error}"
        ))
    })
}

pub fn refused(socket: &Path, error: &api::Error) -> Failure {
    let what = match error.kind() {
        api::ErrorKind::NoSuchVm(args) => format!(
            "the daemon has no VM {:?}: see tmemctl list",
            args.as_ref().map_or("", |args| &args.name)
        ),
        api::ErrorKind::ReadOnlySocket(_) => format!(
            "the socket {} is for looking only: name the other one with --socket",
            socket.display()
        ),
        api::ErrorKind::BadSize(Some(args)) => {
            format!(
                "a pool cannot have {} bytes: {}",
                args.size_bytes, args.reason
            )
        }
        _ if api::was_shut(error) => {
            let what = format!(
                "the daemon at {} has too many clients, or refuses this user: its log says which; try \
                 again, or use its other socket",
                socket.display()
            );
            return Failure(what, 3);
        }
        _ if is_unknown(error) => format!(
            "the daemon at {} is older than this tmemctl and does not know that: tmemctl version",
            socket.display()
        ),
        _ => match error.source_varlink_kind() {
            Some(kind) => format!("the daemon at {} did not answer: {kind}", socket.display()),
            None => format!("the daemon at {} refused: {error}", socket.display()),
        },
    };
    Failure(what, 1)
}

fn is_unknown(error: &api::Error) -> bool {
    let kind = error.source_varlink_kind();
    matches!(kind, Some(varlink::ErrorKind::MethodNotFound(_)))
}
