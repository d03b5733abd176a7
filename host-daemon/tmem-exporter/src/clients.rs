// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The clients whose request has not arrived yet. A client sends its token with the request, so
//! until then the exporter cannot tell a Prometheus server from any other peer.
//!
//! If there are too many such clients, the server disconnects one to make place for a new one: the
//! oldest client of the address that has most of them. So peers that send nothing, or send slowly,
//! keep no other client from sending its token. Limit: peers with very many addresses, or on the
//! address of the Prometheus server, must connect slowly enough that its request arrives first.

use std::net::{IpAddr, Shutdown, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Maximum number of clients whose request has not arrived yet. Each has a thread.
const WAITING_MAX: usize = 64;

/// Clients whose request has not arrived yet.
#[derive(Debug, Default)]
pub struct WaitingClients(Arc<Mutex<List>>);

/// A client in the list of those whose request has not arrived yet. Dropping the value removes the
/// client from the list.
#[derive(Debug)]
pub struct WaitingClient {
    clients: Arc<Mutex<List>>,
    number: u64,
}

#[derive(Debug, Default)]
struct List {
    /// Number of clients that were ever added.
    added: u64,
    /// The clients in the order of their arrival.
    clients: Vec<Client>,
}

#[derive(Debug)]
struct Client {
    number: u64,
    source: IpAddr,
    stream: TcpStream,
}

fn lock(list: &Mutex<List>) -> MutexGuard<'_, List> {
    list.lock().unwrap_or_else(PoisonError::into_inner)
}

impl WaitingClients {
    /// Adds a client. If the list is full, disconnects another client.
    pub fn add(&self, address: IpAddr, stream: TcpStream) -> WaitingClient {
        let mut list = lock(&self.0);
        let source = source(address);
        if list.clients.len() >= WAITING_MAX {
            let sources: Vec<IpAddr> = list.clients.iter().map(|client| client.source).collect();
            let victim = list.clients.remove(victim(&sources));
            // The shutdown fails only if the client has disconnected.
            let _ = victim.stream.shutdown(Shutdown::Both);
        }
        let number = list.added;
        list.added += 1;
        list.clients.push(Client {
            number,
            source,
            stream,
        });
        WaitingClient {
            clients: self.0.clone(),
            number,
        }
    }
}

impl Drop for WaitingClient {
    fn drop(&mut self) {
        lock(&self.clients)
            .clients
            .retain(|client| client.number != self.number);
    }
}

/// Returns the address by which clients are counted. A host with an IPv6 address usually has a whole
/// network of 64 bits.
fn source(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6((address.to_bits() >> 64 << 64).into()),
        address => address,
    }
}

/// Returns the position of the client to disconnect: the oldest of the address with most clients.
fn victim(sources: &[IpAddr]) -> usize {
    let count = |at: usize| {
        sources
            .iter()
            .filter(|other| **other == sources[at])
            .count()
    };
    // max_by_key() returns the last of equal elements, so the clients are visited from the newest to
    // the oldest.
    let positions = (0..sources.len()).rev();
    positions.max_by_key(|at| count(*at)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_client_of_the_address_with_most_clients_is_disconnected() {
        let sources = |list: &[&str]| -> Vec<IpAddr> {
            let parse = |text: &&str| source(text.parse().expect("the address is invalid"));
            list.iter().map(parse).collect()
        };
        for (list, expected) in [
            (&["10.0.0.1"][..], 0),
            (&["10.0.0.1", "10.0.0.2", "10.0.0.3"], 0),
            (&["10.0.0.1", "10.0.0.2", "10.0.0.2"], 1),
            (&["10.0.0.1", "10.0.0.2", "10.0.0.2", "10.0.0.1"], 0),
            (&["10.0.0.1", "::ffff:10.0.0.2", "10.0.0.2"], 1),
            (&["10.0.0.1", "2001:db8::1", "2001:db8::2:0:0:3"], 1),
            (&["10.0.0.1", "2001:db8::1", "2001:db8:1::1"], 0),
        ] {
            assert_eq!(victim(&sources(list)), expected, "{list:?}");
        }
    }
}
