// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Connects libvirt's domains with the virtio-tmem daemon.
//!
//! | directory or file | contents |
//! | --- | --- |
//! | `hook/` | program `tmem-hook`, which libvirt runs when a VM starts, arrives or ends |
//! | `bridge/` | program `tmem-libvirt`, which follows running domains; the only user of libvirt's library |
//! | `domain/` | reads and edits the XML of a domain |
//! | `owner.rs` | owner of a socket, and description of a domain's VM for the daemon, which both programs send |
//! | `arguments.rs` | command line of the bridge, also for its man page |

#[cfg(feature = "bridge")]
pub mod arguments;
pub mod domain;
pub mod owner;
