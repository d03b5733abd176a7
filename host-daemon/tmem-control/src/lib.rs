// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The control interface of tmemd, `io.virtiotmem.Control`, spoken over varlink on Unix sockets.
//!
//! The interface file beside this one is the source; types, client and service stubs are generated
//! from it. The name is the reverse of no registered domain: it only has to differ from others'.
//!
//! Never here: a method that could reach a page's contents, of whatever VM.

/// Generated from `io.virtiotmem.Control.varlink`.
#[allow(missing_docs, non_camel_case_types, clippy::all)]
mod generated {
    include!(concat!(env!("OUT_DIR"), "/io.virtiotmem.Control.rs"));
}

pub mod accounts;
pub mod size;
pub mod statistics;

pub use generated::*;

/// The interface's name.
pub const INTERFACE: &str = "io.virtiotmem.Control";

/// Where the daemon's control socket is unless told otherwise.
pub const DEFAULT_SOCKET: &str = "/run/virtio-tmem/control";

/// Where its socket for the methods that only read is, if it has one.
pub const DEFAULT_READ_ONLY_SOCKET: &str = "/run/virtio-tmem/control-ro";

/// A client of the control socket at `path`.
pub fn connect(path: &std::path::Path) -> varlink::Result<VarlinkClient> {
    let address = format!("unix:{}", path.display());
    Ok(VarlinkClient::new(varlink::Connection::with_address(
        &address,
    )?))
}

/// The daemon shut the connection instead of answering, as it does with clients above its limit.
pub fn was_shut(error: &Error) -> bool {
    let kind = error.source_varlink_kind();
    matches!(kind, Some(varlink::ErrorKind::ConnectionClosed))
}

/// Weight of a VM that is told none.
pub const WEIGHT_DEFAULT: u32 = 100;

/// A quota as the interface has it; what is left out is the daemon's default.
pub fn quota(reserve_bytes: Option<u64>, limit_bytes: Option<u64>, weight: Option<u32>) -> Quota {
    // varlink integers are signed.
    let int = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
    Quota {
        reserve_bytes: int(reserve_bytes.unwrap_or(0)),
        limit_bytes: limit_bytes.map(int),
        weight: i64::from(weight.unwrap_or(WEIGHT_DEFAULT)),
    }
}
