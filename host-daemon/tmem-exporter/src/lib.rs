// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Command line of tmem-exporter, for the program and for its man page and completions.

use clap::Parser;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;

/// Metrics of the virtio-tmem host daemon for Prometheus, over HTTP.
#[derive(Parser)]
#[command(version)]
pub struct Arguments {
    /// Address to listen on; :PORT means all addresses. An address that other hosts can reach needs
    /// --token-file, or client certificates in --web.config.file
    #[arg(long = "web.listen-address", value_name = "ADDRESS:PORT", default_value = "127.0.0.1:9752",
          value_parser = parse_address)]
    pub listen: SocketAddr,
    /// File that configures TLS, in the format of Prometheus' exporters (tls_server_config)
    #[arg(long = "web.config.file", value_name = "PATH")]
    pub web_config: Option<PathBuf>,
    /// The daemon's read-only control socket
    #[arg(long, value_name = "PATH", default_value = tmem_control::DEFAULT_READ_ONLY_SOCKET)]
    pub socket: PathBuf,
    /// File with a token, which clients must send: Authorization: Bearer TOKEN
    #[arg(long, value_name = "PATH")]
    pub token_file: Option<PathBuf>,
    /// Maximum number of VMs with metrics; the metrics of further VMs are left out
    #[arg(long, value_name = "N", default_value_t = 1024)]
    pub vms_max: usize,
    /// Export fewer series for each VM: no histograms, one total in place of the series for each
    /// reason, cause or form, and only the current state of the driver
    #[arg(long)]
    pub vm_totals_only: bool,
}

/// Parses the address to listen on. As in other exporters, an empty host means all addresses.
fn parse_address(text: &str) -> Result<SocketAddr, String> {
    let text = match text.strip_prefix(':') {
        Some(port) => format!("[::]:{port}"),
        None => text.into(),
    };
    let mut found = text.to_socket_addrs().map_err(|error| error.to_string())?;
    found
        .next()
        .ok_or_else(|| "the host name has no address".into())
}
