// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The daemon's data path (workers and connections) within the process of the benchmark. There are
//! no background workers, because the benchmark does the background work itself, between
//! measurements.

use crate::path::guest::Guest;
use rustix::thread::{CpuSet, Pid, sched_setaffinity};
use std::fs;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tmem_model::HeadlessDaemon;
use tmem_pool::{Quota, Tenant};
use tmemd::config::{EventLoop, Waiting};
use tmemd::parts::{ClockAndEntropy, ConnectionContext, Peer, Workers, serve};

/// Largest number of pages that one call of `maintain` handles in the background work.
const MAINTAIN_PAGES: usize = 4096;

/// Longest time that the benchmark waits for a worker's thread to start.
const START_MAX: Duration = Duration::from_secs(5);

/// Stack size in bytes of a thread that handles a guest's connection.
const STACK_BYTES: usize = 256 << 10;

/// A daemon in this process. It has no worker threads until [`BenchDaemon::serve`] starts one.
pub struct BenchDaemon {
    pub daemon: HeadlessDaemon,
}

/// A worker thread that answers guests, with the context of its connections.
pub struct Path {
    shared: ConnectionContext,
    /// Thread id of the only worker.
    pub worker: Pid,
}

impl BenchDaemon {
    /// Creates a daemon with an empty pool of this size in bytes.
    pub fn new(size_bytes: u64) -> BenchDaemon {
        BenchDaemon {
            daemon: HeadlessDaemon::new(size_bytes, 42, ClockAndEntropy::host()),
        }
    }

    /// Starts one worker thread and pins it to the given processor.
    ///
    /// # Errors
    /// The system cannot start the worker's thread.
    pub fn serve(
        &self,
        event_loop: EventLoop,
        poll_max: Duration,
        processor: usize,
    ) -> Result<Path, String> {
        let waiting = Waiting {
            event_loop,
            poll_max,
        };
        let fault = |error: std::io::Error| format!("cannot start a worker: {error}");
        let before = threads("worker-");
        let workers =
            Workers::start(1, waiting, &self.daemon.background, &Arc::default()).map_err(fault)?;
        // The worker's thread gives itself its name, so wait until a further thread has the name of
        // a worker.
        let begun = Instant::now();
        let worker = loop {
            let new = threads("worker-")
                .into_iter()
                .find(|thread| !before.contains(thread));
            match new {
                Some(worker) => break worker,
                None if begun.elapsed() < START_MAX => std::thread::yield_now(),
                None => {
                    return Err(format!(
                        "no thread of the worker appeared within {START_MAX:?}"
                    ));
                }
            }
        };
        pin(Some(worker), processor)?;
        Ok(Path {
            shared: self.daemon.context(workers),
            worker,
        })
    }

    /// Connects a guest as a VM with its own trust domain and the given reserve in bytes.
    ///
    /// # Errors
    /// The daemon refuses the connection.
    pub fn connect(
        &self,
        path: &Path,
        name: &str,
        reserve_bytes: u64,
        guest: &mut Guest,
    ) -> Result<(), String> {
        let quota = Quota {
            reserve_bytes,
            limit_bytes: None,
            weight: 100,
        };
        self.connect_as(path, name, None, quota, guest)
    }

    /// Connects a guest as a VM with the given trust domain and quota.
    ///
    /// # Errors
    /// The daemon refuses the connection.
    pub fn connect_as(
        &self,
        path: &Path,
        name: &str,
        trust_domain: Option<&str>,
        quota: Quota,
        guest: &mut Guest,
    ) -> Result<(), String> {
        let connect = |stream| guest.connect(stream);
        self.connect_by(path, name, trust_domain, quota, connect)?;
        Ok(())
    }

    /// Connects a guest of any kind, by calling `connect` with the guest's end of the connection.
    /// Returns the guest's tenant, so that the caller can also call the engine directly.
    ///
    /// # Errors
    /// The daemon refuses the connection.
    pub fn connect_by(
        &self,
        path: &Path,
        name: &str,
        trust_domain: Option<&str>,
        quota: Quota,
        connect: impl FnOnce(UnixStream) -> Result<(), String>,
    ) -> Result<Tenant, String> {
        let tenant = self.daemon.tenant_with(name, trust_domain, quota);
        let vm = self.daemon.vm(name, tenant.clone(), Arc::default());
        let fault = |error: std::io::Error| error.to_string();
        let (own, other) = UnixStream::pair().map_err(fault)?;
        let peer = Peer::new(own.try_clone().map_err(fault)?);
        let shared = path.shared.clone();
        // The connection's thread ends when the guest closes the connection or this process ends.
        std::thread::Builder::new()
            .name("connection".into())
            .stack_size(STACK_BYTES)
            .spawn(move || serve(&vm, own, peer, &shared))
            .map_err(fault)?;
        connect(other)?;
        Ok(tenant)
    }

    /// Does background work until no page is raw and nothing is left to free.
    pub fn maintain_all(&self) {
        let clock = &self.daemon.clock;
        while self.daemon.maintain(clock.now_ns(), MAINTAIN_PAGES) {}
    }
}

impl Path {
    /// Returns the processor time that the worker has used, in ns.
    pub fn cpu_ns(&self) -> f64 {
        cpu_ns(self.worker)
    }
}

impl Drop for Path {
    fn drop(&mut self) {
        self.shared.workers.stop();
    }
}

/// Returns the threads of this process whose names begin with `name`.
pub fn threads(name: &str) -> Vec<Pid> {
    let Ok(all) = fs::read_dir("/proc/self/task") else {
        return Vec::new();
    };
    let named = all.flatten().filter(|thread| {
        let comm = fs::read_to_string(thread.path().join("comm"));
        comm.is_ok_and(|comm| comm.starts_with(name))
    });
    let number = |thread: fs::DirEntry| thread.file_name().to_str()?.parse().ok();
    named.filter_map(number).filter_map(Pid::from_raw).collect()
}

/// Returns the processor time that a thread has used, in ns.
pub fn cpu_ns(thread: Pid) -> f64 {
    let path = format!("/proc/{}/schedstat", thread.as_raw_nonzero());
    let text = fs::read_to_string(path).unwrap_or_default();
    let first = text.split(' ').next().and_then(|ns| ns.parse().ok());
    first.unwrap_or(f64::NAN)
}

/// Returns how often a thread went to sleep: its voluntary context switches.
pub fn switches(thread: Pid) -> u64 {
    let path = format!("/proc/{}/status", thread.as_raw_nonzero());
    let text = fs::read_to_string(path).unwrap_or_default();
    let lines = text
        .lines()
        .filter(|line| line.starts_with("voluntary_ctxt"));
    lines
        .filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok())
        .sum()
}

/// Pins a thread to one processor. With None, pins the calling thread.
///
/// # Errors
/// The processor does not exist, or the process may not use it.
pub fn pin(thread: Option<Pid>, processor: usize) -> Result<(), String> {
    let mut set = CpuSet::new();
    set.set(processor);
    sched_setaffinity(thread, &set)
        .map_err(|error| format!("cannot pin a thread to processor {processor}: {error}"))
}
