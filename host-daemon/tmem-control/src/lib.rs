// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The control interface of tmemd, `io.virtiotmem.Control`, spoken over varlink on Unix sockets.
//!
//! The interface file in this directory is the source; types, client and service stubs are
//! generated from it. The interface name is not the reverse of a registered domain: it only has to
//! differ from other interfaces' names.
//!
//! Out of scope: a method that could read the contents of a page of any VM.

/// Code generated from `io.virtiotmem.Control.varlink`.
#[allow(missing_docs, non_camel_case_types, clippy::all)]
mod generated {
    include!(concat!(env!("OUT_DIR"), "/io.virtiotmem.Control.rs"));
}

pub mod accounts;
pub mod size;
pub mod statistics;

pub use generated::*;

/// Name of the varlink interface.
pub const INTERFACE: &str = "io.virtiotmem.Control";

/// Name of the feature bit of retained pages, as the method `GetFeatures` returns it.
pub const FEATURE_RETAIN: &str = "VIRTIO_TMEM_F_RETAIN";

/// Default path of the daemon's control socket.
pub const DEFAULT_SOCKET: &str = "/run/virtio-tmem/control";

/// Default path of the daemon's read-only control socket, which accepts only the methods that
/// change nothing. The daemon may run without it.
pub const DEFAULT_READ_ONLY_SOCKET: &str = "/run/virtio-tmem/control-ro";

/// Connects to the control socket at `path`.
pub fn connect(path: &std::path::Path) -> varlink::Result<VarlinkClient> {
    let address = format!("unix:{}", path.display());
    Ok(VarlinkClient::new(varlink::Connection::with_address(
        &address,
    )?))
}

/// Returns true if the daemon is too old to know the method that it was asked for.
pub fn is_unknown(error: &Error) -> bool {
    let kind = error.source_varlink_kind();
    matches!(kind, Some(varlink::ErrorKind::MethodNotFound(_)))
}

/// Returns whether the daemon knows retained pages. A daemon that is too old to know the method does
/// not know them.
///
/// # Errors
/// Returns an error if the daemon cannot be asked.
pub fn knows_retained_pages(client: &mut VarlinkClient) -> Result<bool> {
    match client.get_features().call() {
        Ok(reply) => Ok(reply.features.iter().any(|name| name == FEATURE_RETAIN)),
        Err(error) if is_unknown(&error) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Returns true if the daemon closed the connection instead of answering, as it does with clients
/// above its limit.
pub fn was_shut(error: &Error) -> bool {
    let kind = error.source_varlink_kind();
    matches!(kind, Some(varlink::ErrorKind::ConnectionClosed))
}

/// Weight of a VM whose quota names none.
pub const WEIGHT_DEFAULT: u32 = 100;

/// Builds a quota of the interface; a missing value becomes the daemon's default.
pub fn quota(reserve_bytes: Option<u64>, limit_bytes: Option<u64>, weight: Option<u32>) -> Quota {
    // varlink integers are signed 64-bit numbers.
    let int = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
    Quota {
        reserve_bytes: int(reserve_bytes.unwrap_or(0)),
        limit_bytes: limit_bytes.map(int),
        weight: i64::from(weight.unwrap_or(WEIGHT_DEFAULT)),
    }
}
