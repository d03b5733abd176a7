// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The parts that all programs of the host share: the control interface of tmemd,
//! `io.virtiotmem.Control`, and the log ([`log`]). The protocol of the interface is varlink on Unix
//! sockets.
//!
//! The types, the client and the service stubs are generated from the interface file in this
//! directory. The interface name is not the reverse of a registered domain: it only has to differ
//! from other interfaces' names.
//!
//! Out of scope: a method that could read the contents of a page of any VM.

/// Code generated from `io.virtiotmem.Control.varlink`.
#[allow(missing_docs, non_camel_case_types, clippy::all)]
mod generated {
    include!(concat!(env!("OUT_DIR"), "/io.virtiotmem.Control.rs"));
}

pub mod accounts;
pub mod arcstats;
pub mod log;
pub mod overcommit;
pub mod size;
#[cfg(test)]
mod statistics_test;

pub use generated::*;
pub use tmem_trace::statistics;

/// Name of tmemd's control interface in varlink.
pub const INTERFACE: &str = "io.virtiotmem.Control";

/// Name that the method `GetFeatures` returns if the daemon supports retained pages (pages that a
/// get leaves in the pool).
pub const FEATURE_RETAIN: &str = "VIRTIO_TMEM_F_RETAIN";

/// Default path of the daemon's control socket.
pub const DEFAULT_SOCKET: &str = "/run/virtio-tmem/control";

/// Default path of the daemon's read-only control socket. It accepts only methods that change
/// nothing. The daemon may run without it.
pub const DEFAULT_READ_ONLY_SOCKET: &str = "/run/virtio-tmem/control-ro";

/// Exit status of a service whose configuration is invalid, EX_CONFIG of sysexits.h. The systemd
/// units name it in `RestartPreventExitStatus=`, because a restart cannot correct a configuration.
pub const EXIT_CONFIGURATION: u8 = 78;

/// Connects to the daemon's control socket at `path`.
pub fn connect(path: &std::path::Path) -> varlink::Result<VarlinkClient> {
    let address = format!("unix:{}", path.display());
    Ok(VarlinkClient::new(varlink::Connection::with_address(
        &address,
    )?))
}

/// Returns true if `error` means that the daemon does not know the method, because the daemon is
/// older than the client.
pub fn is_unknown(error: &Error) -> bool {
    let kind = error.source_varlink_kind();
    matches!(kind, Some(varlink::ErrorKind::MethodNotFound(_)))
}

/// Returns whether the daemon supports retained pages. A daemon that is too old for the method
/// `GetFeatures` does not support them.
///
/// # Errors
/// Returns an error if the daemon does not answer, or answers with another error.
pub fn knows_retained_pages(client: &mut VarlinkClient) -> Result<bool> {
    match client.get_features().call() {
        Ok(reply) => Ok(reply.features.iter().any(|name| name == FEATURE_RETAIN)),
        Err(error) if is_unknown(&error) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Returns true if `error` means that the daemon closed the connection without an answer. The
/// daemon does so if it has too many clients.
pub fn is_connection_closed(error: &Error) -> bool {
    let kind = error.source_varlink_kind();
    matches!(kind, Some(varlink::ErrorKind::ConnectionClosed))
}

/// Weight of a VM whose quota has no weight.
pub const WEIGHT_DEFAULT: u32 = 100;

/// Creates a quota for the control interface. A value that is None becomes the daemon's default.
pub fn quota(reserve_bytes: Option<u64>, limit_bytes: Option<u64>, weight: Option<u32>) -> Quota {
    // A size above the largest signed 64-bit number becomes that number, because varlink has no
    // larger integers.
    let int = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
    Quota {
        reserve_bytes: int(reserve_bytes.unwrap_or(0)),
        limit_bytes: limit_bytes.map(int),
        weight: i64::from(weight.unwrap_or(WEIGHT_DEFAULT)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_that_a_daemon_of_another_version_lacks_are_zero() {
        let answer = r#"{"daemon":{"version":"0.0.9","pid":1},"pool":{"pages":2,"unknown":"x"},
            "vms":[{"name":"web1","hits":3,"put_latency":{"sum_ns":4},"driver":{"state":"on"}}]}"#;
        let reply: GetStats_Reply = serde_json::from_str(answer)
            .expect("the statistics of another daemon version are refused");
        assert_eq!(
            (reply.daemon.version.as_str(), reply.pool.pages),
            ("0.0.9", 2)
        );
        let vm = &reply.vms[0];
        assert_eq!(
            (vm.hits, vm.retained_hits, vm.put_latency.sum_ns),
            (3, 0, 4)
        );
        assert!(vm.ref_latency.buckets.is_empty() && vm.driver.is_some());
    }

    #[test]
    fn a_call_with_a_missing_argument_is_refused() {
        assert!(serde_json::from_str::<Quota>(r#"{"reserve_bytes":0}"#).is_err());
        assert!(serde_json::from_str::<VmSpec>("{}").is_err());
    }
}
