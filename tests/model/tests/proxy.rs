// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of vhost-proxy with a fake guest and a daemon. The tests of native guests rely on the
//! proxy: it reconnects, it counts and fails configuration reads after the probe, and it outlives
//! the daemon.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};
use tmem_model::TestDaemon;
use tmem_model::frontend::CONFIG_BYTES;
use tmem_model::{FakeGuest, GuestConfig, Request};
use virtio_tmem as wire;

/// Longest time for which a test waits.
const TIMEOUT: Duration = Duration::from_secs(60);

fn until(what: &str, mut check: impl FnMut() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !check() {
        assert!(Instant::now() < deadline, "not reached in time: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A process of vhost-proxy. Dropping the value ends the process.
struct Proxy {
    child: Child,
    socket: PathBuf,
    output: PathBuf,
}

impl Proxy {
    fn start(daemon: &TestDaemon, option: &[&str]) -> Proxy {
        let (socket, output) = (daemon.path("proxy.sock"), daemon.path("proxy.log"));
        let child = Command::new(env!("CARGO_BIN_EXE_vhost-proxy"))
            .args([&socket, &daemon.path("a.sock")])
            .args(option)
            .stdout(File::create(&output).unwrap())
            .spawn()
            .unwrap();
        let proxy = Proxy {
            child,
            socket,
            output,
        };
        proxy.until_counts("\"connected\":true");
        proxy
    }

    /// Waits until the last counts of the proxy contain `part`.
    fn until_counts(&self, part: &str) {
        until(&format!("the proxy reports {part}"), || {
            let text = std::fs::read_to_string(&self.output).unwrap();
            text.lines().last().is_some_and(|line| line.contains(part))
        });
    }

    fn end_probe(&self) {
        let mut path = self.socket.clone().into_os_string();
        path.push(".probed");
        File::create(Path::new(&path)).unwrap();
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn create_pool(pool: u32) -> Request {
    Request::PoolCreate { pool, flags: 0 }
}

/// The daemon is replaced while a request is in flight. The proxy connects again, and the next
/// daemon answers the request, whether the proxy replays it or skips it.
#[test]
fn the_proxy_outlives_the_daemon() {
    for (option, skips) in [(&[][..], false), (&["--skip"][..], true)] {
        let mut daemon = TestDaemon::start(&["a"]);
        let proxy = Proxy::start(&daemon, option);
        let mut guest = FakeGuest::new(GuestConfig::default()).unwrap();
        guest.connect(&proxy.socket).unwrap();
        guest.start().unwrap();
        let answer = guest.call(0, create_pool(1)).unwrap();
        assert_eq!(answer.status, wire::S_OK);
        for connection in 2..5 {
            daemon.stop();
            proxy.until_counts("\"connected\":false");
            guest.submit(0, create_pool(connection)).unwrap();
            daemon.restart();
            let done = guest.drain(TIMEOUT).unwrap();
            assert_eq!(
                done[0].answer.status,
                wire::S_STALE,
                "skips {skips}: the next daemon answered a request of the old generation"
            );
            proxy.until_counts(&format!("\"connections\":{connection},"));
        }
        proxy.until_counts("\"losses\":3,");
        assert!(guest.poll_all().unwrap().is_empty());
    }
}

/// Sends a vhost-user message with the payload `payload`. Returns the payload of the reply, if
/// `answered` says that the message has one. The test does not use the vhost crate here, because its
/// front end waits for ever for the rest of a failed configuration read's reply.
fn message(proxy: &mut UnixStream, request: u32, payload: &[u8], answered: bool) -> Vec<u8> {
    let header = [request, 1, payload.len() as u32];
    let mut bytes: Vec<u8> = header.iter().flat_map(|word| word.to_le_bytes()).collect();
    bytes.extend(payload);
    proxy.write_all(&bytes).unwrap();
    if !answered {
        return Vec::new();
    }
    let mut header = [0; 12];
    proxy.read_exact(&mut header).unwrap();
    let size = u32::from_le_bytes(header[8..].try_into().unwrap());
    let mut reply = vec![0; size as usize];
    proxy.read_exact(&mut reply).unwrap();
    reply
}

#[test]
fn configuration_reads_after_the_probe_are_counted_and_fail() {
    const GET_FEATURES: u32 = 1;
    const GET_PROTOCOL_FEATURES: u32 = 15;
    const SET_PROTOCOL_FEATURES: u32 = 16;
    const GET_CONFIG: u32 = 24;
    let daemon = TestDaemon::start(&["a"]);
    let proxy = Proxy::start(&daemon, &[]);
    let mut front_end = UnixStream::connect(&proxy.socket).unwrap();
    front_end.set_read_timeout(Some(TIMEOUT)).unwrap();
    message(&mut front_end, GET_FEATURES, &[], true);
    let features = message(&mut front_end, GET_PROTOCOL_FEATURES, &[], true);
    message(&mut front_end, SET_PROTOCOL_FEATURES, &features, false);
    // The payload has offset 0, the size, no flags, and room for the configuration.
    let mut read = vec![0; 12 + CONFIG_BYTES];
    read[4] = CONFIG_BYTES as u8;
    let reply = message(&mut front_end, GET_CONFIG, &read, true);
    let page_size = u32::from_le_bytes(reply[20..24].try_into().unwrap());
    assert_eq!(page_size, wire::PAGE_SIZE as u32);
    proxy.until_counts("\"reads_forwarded\":1,\"reads_failed\":0");
    proxy.end_probe();
    // A failed read has no configuration in its reply, and does not end the connection.
    for failed in 1..3 {
        let reply = message(&mut front_end, GET_CONFIG, &read, true);
        assert_eq!(reply.len(), 12);
        proxy.until_counts(&format!("\"reads_forwarded\":1,\"reads_failed\":{failed}"));
    }
}
