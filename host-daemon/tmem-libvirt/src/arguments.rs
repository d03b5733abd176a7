// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Command line of tmem-libvirt, for the program and for its man page and completions.

use clap::Parser;
use std::path::PathBuf;

/// Passes the cache settings of libvirt's domains on to the virtio-tmem daemon.
#[derive(Parser)]
#[command(version)]
pub struct Arguments {
    /// URI of the libvirt to follow; the connection is read-only
    #[arg(short, long, value_name = "URI", default_value = "qemu:///system")]
    pub connect: String,
    /// Control socket of the daemon
    #[arg(long, value_name = "PATH", default_value = tmem_control::DEFAULT_SOCKET)]
    pub socket: PathBuf,
    /// User that QEMU runs as and that may connect to the sockets of VMs: a name, a number, or
    /// "none" for the daemon's own; default: that of /etc/libvirt/qemu.conf, or the distribution's
    #[arg(long, value_name = "USER")]
    pub owner: Option<String>,
}
