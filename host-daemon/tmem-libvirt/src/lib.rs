// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Connects libvirt's domains with the virtio-tmem daemon.
//!
//! | directory or file | contents |
//! | --- | --- |
//! | `hook/` | program `tmem-hook`, which libvirt runs when a VM starts, arrives or ends |
//! | `bridge/` | program `tmem-libvirt`, which follows running domains; the only user of libvirt's library |
//! | `domain/` | reads and edits the XML of a domain |
//! | `vm_spec.rs`, `owner.rs` | description of a domain's VM for the daemon, which both programs send |
//! | `call_error.rs` | reasons why a call to the daemon fails |
//! | `arguments.rs` | command line of the bridge, also for its man page |

#[cfg(feature = "bridge")]
mod arguments;
mod call_error;
pub mod domain;
mod owner;
mod vm_spec;

#[cfg(feature = "bridge")]
pub use arguments::Arguments;
pub use call_error::CallError;
pub use owner::Owner;
pub use vm_spec::{other_socket, vm_spec};
