// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Runs a real tmemd in a directory of its own, for simulated guests.
//!
//! A test that waits polls the condition until a time limit. A test that fails prints the daemon's
//! log.
#![allow(dead_code, reason = "each test binary uses its part")]

use std::fs::{self, File};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tmem_sim::{Driver, DriverConfig, GuestConfig, Request};
use virtio_tmem as wire;

/// Time limit of every wait. It is long enough for a busy machine and a debug build.
pub const TIMEOUT: Duration = Duration::from_secs(30);

/// Multiplies a time limit by TMEM_TIMEOUT_SCALE, as the tests on VMs do. Slow machines set it
/// above 1.
pub fn scaled(time: Duration) -> Duration {
    let scale = std::env::var("TMEM_TIMEOUT_SCALE");
    time.mul_f64(scale.map_or(1.0, |scale| {
        scale.parse().expect("the text is not a number")
    }))
}

/// Polls until `check` returns true. Panics with `what` after [`TIMEOUT`].
pub fn until(what: &str, mut check: impl FnMut() -> bool) {
    let deadline = Instant::now() + scaled(TIMEOUT);
    while !check() {
        assert!(
            Instant::now() < deadline,
            "timeout while waiting until: {what}"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Number of consecutive checks that must find a daemon idle before it counts as idle.
const IDLE_CHECKS: u32 = 5;

/// Arguments that keep the daemon from reading the host's memory statistics. Otherwise the tests
/// would depend on other processes, and the file that the daemon opens once a second would disturb
/// tests that count descriptors.
pub const HOST_IS_NO_MATTER: [&str; 4] = ["--host-free-min", "0", "--memory-pressure", "none"];

/// A running tmemd and the names of its VMs.
pub struct Daemon {
    dir: TempDir,
    vms: Vec<(String, Option<String>)>,
    pool_size: String,
    arguments: Vec<String>,
    environment: Vec<(String, String)>,
    child: Option<Child>,
}

impl Daemon {
    /// Starts a daemon with a large pool. Each VM is given by its name and its trust domain, if it
    /// has one.
    pub fn start(vms: &[(&str, Option<&str>)]) -> Self {
        Self::with_pool(vms, "512MiB")
    }

    /// Starts a daemon with a pool of the given size.
    pub fn with_pool(vms: &[(&str, Option<&str>)], pool_size: &str) -> Self {
        Self::with_arguments(vms, pool_size, |_| Vec::new())
    }

    /// Starts a daemon with more arguments, which may name files in its directory.
    pub fn with_arguments(
        vms: &[(&str, Option<&str>)],
        pool_size: &str,
        arguments: impl FnOnce(&Path) -> Vec<String>,
    ) -> Self {
        let mut daemon = Self::new(vms, pool_size);
        daemon.arguments = arguments(daemon.dir.path());
        daemon.spawn();
        daemon
    }

    /// Starts a daemon with an environment, which may name files in its directory.
    pub fn with_environment(
        vms: &[(&str, Option<&str>)],
        environment: impl FnOnce(&Path) -> Vec<(String, String)>,
    ) -> Self {
        let mut daemon = Self::new(vms, "512MiB");
        daemon.environment = environment(daemon.dir.path());
        daemon.spawn();
        daemon
    }

    fn new(vms: &[(&str, Option<&str>)], pool_size: &str) -> Self {
        Self {
            dir: tempfile::Builder::new()
                .prefix("tmemd-test")
                .tempdir()
                .unwrap(),
            vms: vms
                .iter()
                .map(|(n, d)| ((*n).into(), d.map(Into::into)))
                .collect(),
            pool_size: pool_size.into(),
            arguments: Vec::new(),
            environment: Vec::new(),
            child: None,
        }
    }

    /// Starts the daemon, for the first time or again, and waits until every VM's socket accepts
    /// connections.
    pub fn spawn(&mut self) {
        assert!(self.child.is_none());
        let path = self.dir.path();
        let log = File::options()
            .append(true)
            .create(true)
            .open(path.join("log"))
            .unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_tmemd"));
        command.args(["--pool-size", &self.pool_size]);
        command.args(HOST_IS_NO_MATTER);
        command.arg("--control").arg(path.join("control"));
        for (name, domain) in &self.vms {
            let socket = self.socket(name);
            let mut vm = format!("socket={},name={name}", socket.display());
            if let Some(domain) = domain {
                vm += &format!(",trust_domain={domain}");
            }
            command.args(["--vm", &vm]);
        }
        // Both event loops must pass the same tests, so `make test-rust` sets this variable to
        // select one of them.
        if let Ok(event_loop) = std::env::var("TMEM_EVENT_LOOP") {
            command.args(["--event-loop", &event_loop]);
        }
        command
            .args(&self.arguments)
            .envs(self.environment.clone())
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log);
        self.child = Some(command.spawn().unwrap());
        for (name, _) in self.vms.clone() {
            let socket = self.socket(&name);
            self.until("tmemd accepts connections", || {
                UnixStream::connect(&socket).is_ok()
            });
        }
    }

    /// Returns the socket of a VM.
    pub fn socket(&self, name: &str) -> PathBuf {
        self.dir.path().join(format!("{name}.sock"))
    }

    /// Kills the daemon with SIGKILL and waits until it is dead.
    pub fn kill(&mut self) {
        let mut child = self.child.take().expect("tmemd does not run");
        child.kill().unwrap();
        assert_eq!(
            child.wait().unwrap().signal(),
            Some(9),
            "tmemd ended before it was killed"
        );
    }

    /// Sends SIGTERM and waits until the daemon has ended without an error.
    pub fn terminate(&mut self) {
        let mut child = self.child.take().expect("tmemd does not run");
        kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
        assert!(child.wait().unwrap().success());
    }

    /// Returns the daemon's process id.
    pub fn pid(&self) -> u32 {
        self.child.as_ref().expect("tmemd does not run").id()
    }

    /// Returns the path of a file in the daemon's directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Stops the daemon with SIGSTOP for the given time.
    pub fn freeze(&self, time: Duration) {
        let child = self.child.as_ref().expect("tmemd does not run");
        let pid = Pid::from_child(child);
        kill_process(pid, Signal::STOP).unwrap();
        std::thread::sleep(time);
        kill_process(pid, Signal::CONT).unwrap();
    }

    /// Waits until the daemon is idle and stops it until [`Self::resume`]. When this returns, none
    /// of its threads runs. The daemon must be idle, because an answer that the guest has seen may
    /// not be the last access of a worker.
    pub fn suspend(&mut self) {
        let pid = Pid::from_child(self.child.as_ref().expect("tmemd does not run"));
        let tasks = format!("/proc/{pid}/task");
        // In /proc the state follows the name, which is in parentheses.
        let all_are = |state: &str| {
            let mut tasks = fs::read_dir(&tasks).unwrap().map(Result::unwrap);
            tasks.all(|task| {
                fs::read_to_string(task.path().join("stat")).is_ok_and(|stat| {
                    stat.rsplit_once(')')
                        .is_some_and(|(_, rest)| rest.starts_with(&format!(" {state}")))
                })
            })
        };
        // The state is checked several times, because a thread that waits for a lock also sleeps.
        let mut idle = 0;
        self.until("all threads sleep", || {
            idle = if all_are("S") { idle + 1 } else { 0 };
            idle == IDLE_CHECKS
        });
        kill_process(pid, Signal::STOP).unwrap();
        self.until("all threads stop", || all_are("T"));
    }

    /// Ends the stop that [`Self::suspend`] began.
    pub fn resume(&self) {
        let pid = Pid::from_child(self.child.as_ref().expect("tmemd does not run"));
        kill_process(pid, Signal::CONT).unwrap();
    }

    /// Returns the resources that the daemon uses.
    pub fn taken(&self) -> Taken {
        taken_by(self.child.as_ref().expect("tmemd does not run").id() as i32)
    }

    /// Panics with the log if the daemon has ended.
    pub fn expect_alive(&mut self) {
        let status = self
            .child
            .as_mut()
            .expect("tmemd does not run")
            .try_wait()
            .unwrap();
        assert_eq!(status, None, "tmemd ended by itself");
    }

    /// Polls until `check` returns true. Panics with `what` and the daemon's log if the daemon ends
    /// or [`TIMEOUT`] has passed.
    pub fn until(&mut self, what: &str, mut check: impl FnMut() -> bool) {
        until(what, || {
            check() || {
                self.expect_alive();
                false
            }
        });
    }

    /// Connects a driver, and tries again while the VM still has another connection: that of an
    /// earlier driver, or the one with which [`Self::spawn`] tests the socket. The daemon accepts
    /// one connection at a time.
    pub fn connect(&mut self, driver: &mut Driver, name: &str) {
        let socket = self.socket(name);
        let guest = &mut driver.guest;
        self.until("the VM's socket is free", || guest.connect(&socket).is_ok());
        driver.guest.start().unwrap();
        driver.new_generation().unwrap();
        driver.settle().unwrap();
        driver.create_pool().unwrap();
    }

    /// Returns a connected driver with ordinary memory.
    pub fn driver(&mut self, name: &str, seed: u64) -> Driver {
        self.driver_with(
            guest(name),
            DriverConfig {
                seed,
                ..DriverConfig::default()
            },
        )
    }

    /// Returns a connected driver.
    pub fn driver_with(&mut self, guest: GuestConfig, config: DriverConfig) -> Driver {
        let name = guest.name.clone();
        let mut driver = Driver::new(guest, config).unwrap();
        self.connect(&mut driver, &name);
        driver
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        if std::thread::panicking() {
            let log = fs::read_to_string(self.dir.path().join("log")).unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            let tail = &lines[lines.len().saturating_sub(40)..];
            eprintln!("--- tmemd's log\n{}", tail.join("\n"));
        }
    }
}

/// Resources that a process uses.
#[derive(Clone, Copy, Debug)]
pub struct Taken {
    /// The process id.
    pub pid: i32,
    /// Number of threads.
    pub threads: usize,
    /// Number of file descriptors.
    pub descriptors: usize,
    /// Number of mappings of its address space.
    pub mappings: usize,
    /// Resident memory of the process in bytes, without guest memory.
    pub memory_bytes: usize,
}

impl Taken {
    /// Returns the maximum of each value.
    pub fn most(&self, other: &Taken) -> Taken {
        Taken {
            pid: self.pid,
            threads: self.threads.max(other.threads),
            descriptors: self.descriptors.max(other.descriptors),
            mappings: self.mappings.max(other.mappings),
            memory_bytes: self.memory_bytes.max(other.memory_bytes),
        }
    }
}

/// Returns the resources that a process uses now.
pub fn taken_by(pid: i32) -> Taken {
    let read = |name: &str| fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap();
    let entries = |name: &str| fs::read_dir(format!("/proc/{pid}/{name}")).unwrap().count();
    let status = read("status");
    let anonymous = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = anonymous.unwrap().trim().strip_suffix(" kB").unwrap();
    Taken {
        pid,
        threads: entries("task"),
        descriptors: entries("fd"),
        mappings: read("maps").lines().count(),
        memory_bytes: kib.parse::<usize>().unwrap() << 10,
    }
}

/// Returns the configuration of an ordinary simulated guest with that name.
pub fn guest(name: &str) -> GuestConfig {
    GuestConfig {
        name: name.into(),
        ..GuestConfig::default()
    }
}

/// Returns the seed of a random test and prints it. TMEM_SEED replays a run; otherwise each run has
/// another seed.
pub fn seed(test: &str) -> u64 {
    let seed = match std::env::var("TMEM_SEED") {
        Ok(value) => value.parse().expect("TMEM_SEED is not a decimal number"),
        Err(_) => {
            let now = SystemTime::now()
                .duration_since(SystemTime::UNIX_EPOCH)
                .unwrap();
            now.as_nanos() as u64 & 0xff_ffff
        }
    };
    println!("{test}: TMEM_SEED={seed}");
    seed
}

/// Checks that the daemon serves a VM: sends random requests and compares the answers with the
/// model.
pub fn work(driver: &mut Driver, steps: usize) {
    for _ in 0..steps {
        driver.step().unwrap();
    }
    driver.settle().unwrap();
}

/// Sends one request on each queue, and checks that it is answered.
pub fn every_queue_answers(driver: &mut Driver) {
    let pool = driver.pool();
    for queue in 1..driver.guest.num_queues() {
        let get = Request::Get {
            pool,
            object: 1 << 40,
            index: 0,
            cookies: vec![1],
            retain: 0,
        };
        assert!(driver.send(queue, get, vec![]));
        driver.settle().unwrap();
    }
    let report = Request::Report(Box::new([0; tmem_sim::requests::REPORT_BYTES]));
    assert!(driver.send(wire::CONTROL_QUEUE, report, vec![]));
    driver.settle().unwrap();
}
