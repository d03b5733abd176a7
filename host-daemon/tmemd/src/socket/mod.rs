// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Listening Unix sockets and the peers that connect to them.
//!
//! Belongs here: binding a socket, ownership and mode of its file, and the check of a peer's
//! credentials. Out of scope: the protocol that a connection speaks, see `vhost/` and `control/`.

pub(crate) mod credentials;
pub(crate) mod listener;
