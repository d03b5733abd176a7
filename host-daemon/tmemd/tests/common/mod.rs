// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Runs a real tmemd in a directory of its own, for simulated guests.
//!
//! Tests wait for a condition by polling it until a time limit. If a test fails, it prints the
//! daemon's log.
#![allow(dead_code, reason = "each test binary uses its part")]

use std::fs::{self, File};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, setrlimit};
use tempfile::TempDir;
use tmem_model::{Driver, DriverConfig, GuestConfig, Request};
use virtio_tmem as wire;

/// Longest time that a test waits for a condition. It is long enough for a busy machine and a debug
/// build.
pub const TIMEOUT: Duration = Duration::from_secs(30);

/// Multiplies a time limit by the environment variable TMEM_TIMEOUT_SCALE, as the tests on VMs do.
/// The variable is greater than 1 on slow machines.
pub fn scaled(time: Duration) -> Duration {
    let scale = std::env::var("TMEM_TIMEOUT_SCALE");
    time.mul_f64(scale.map_or(1.0, |scale| {
        scale.parse().expect("the value is not a number")
    }))
}

/// Polls `check` until it returns true. Panics with the text `what` after the time limit
/// [`TIMEOUT`].
pub fn until(what: &str, mut check: impl FnMut() -> bool) {
    let deadline = Instant::now() + scaled(TIMEOUT);
    while !check() {
        assert!(
            Instant::now() < deadline,
            "this condition was not reached in time: {what}"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Number of consecutive checks that must find all of a daemon's threads asleep before the daemon
/// counts as idle.
const IDLE_CHECKS: u32 = 5;

/// Arguments with which the daemon does not read the host's memory statistics. Otherwise, the
/// result of a test would depend on other processes. Also, the daemon would open a file once a
/// second, which would disturb tests that count descriptors.
pub const HOST_IS_NO_MATTER: [&str; 4] = ["--host-free-min", "0", "--memory-pressure", "none"];

/// A process of tmemd, and the names of the VMs that it serves.
pub struct Daemon {
    dir: TempDir,
    vms: Vec<(String, Option<String>)>,
    pool_size: String,
    arguments: Vec<String>,
    environment: Vec<(String, String)>,
    child: Option<Child>,
}

impl Daemon {
    /// Starts a daemon with a pool of 512 MiB. Each of `vms` is the name of a VM and, if the VM has
    /// one, its trust domain.
    pub fn start(vms: &[(&str, Option<&str>)]) -> Self {
        Self::with_pool(vms, "512MiB")
    }

    /// Starts a daemon with a pool of `pool_size`, for example "64MiB".
    pub fn with_pool(vms: &[(&str, Option<&str>)], pool_size: &str) -> Self {
        Self::with_arguments(vms, pool_size, |_| Vec::new())
    }

    /// Starts a daemon with additional arguments. The function `arguments` gets the daemon's
    /// directory and may name files in it.
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

    /// Starts a daemon with additional environment variables. The function `environment` gets the
    /// daemon's directory and may name files in it.
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
        // The shard `pool` runs some tests with epoll instead of io_uring. It selects the
        // event loop with the variable TMEM_EVENT_LOOP.
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

    /// Returns the path of a VM's socket.
    pub fn socket(&self, name: &str) -> PathBuf {
        self.dir.path().join(format!("{name}.sock"))
    }

    /// Kills the daemon with SIGKILL and waits until the process has ended.
    pub fn kill(&mut self) {
        let mut child = self
            .child
            .take()
            .expect("tmemd was not started or has already ended");
        child.kill().unwrap();
        assert_eq!(
            child.wait().unwrap().signal(),
            Some(9),
            "tmemd ended before it was killed"
        );
    }

    /// Sends SIGTERM to the daemon and waits until it has ended without an error.
    pub fn terminate(&mut self) {
        let mut child = self
            .child
            .take()
            .expect("tmemd was not started or has already ended");
        kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
        assert!(child.wait().unwrap().success());
    }

    /// Returns the daemon's process id.
    pub fn pid(&self) -> u32 {
        self.child
            .as_ref()
            .expect("tmemd was not started or has already ended")
            .id()
    }

    /// Returns the path of the file `name` in the daemon's directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Stops the daemon with SIGSTOP for the given time, and then lets it continue.
    pub fn freeze(&self, time: Duration) {
        let child = self
            .child
            .as_ref()
            .expect("tmemd was not started or has already ended");
        let pid = Pid::from_child(child);
        kill_process(pid, Signal::STOP).unwrap();
        std::thread::sleep(time);
        kill_process(pid, Signal::CONT).unwrap();
    }

    /// Waits until the daemon is idle, and stops it with SIGSTOP until [`Self::resume`]. After the
    /// call, no thread of the daemon runs. The daemon must be idle, because a worker may still
    /// access guest memory after the guest has seen its answer.
    pub fn suspend(&mut self) {
        let pid = Pid::from_child(
            self.child
                .as_ref()
                .expect("tmemd was not started or has already ended"),
        );
        let tasks = format!("/proc/{pid}/task");
        // In /proc/PID/task/TID/stat, the state follows the thread's name, which is in parentheses.
        let all_are = |state: &str| {
            let mut tasks = fs::read_dir(&tasks).unwrap().map(Result::unwrap);
            tasks.all(|task| {
                fs::read_to_string(task.path().join("stat")).is_ok_and(|stat| {
                    stat.rsplit_once(')')
                        .is_some_and(|(_, rest)| rest.starts_with(&format!(" {state}")))
                })
            })
        };
        // The threads' state is checked several times, because a thread that waits for a lock also
        // sleeps.
        let mut idle = 0;
        self.until("all threads sleep", || {
            idle = if all_are("S") { idle + 1 } else { 0 };
            idle == IDLE_CHECKS
        });
        kill_process(pid, Signal::STOP).unwrap();
        self.until("all threads stop", || all_are("T"));
    }

    /// Lets the daemon continue that [`Self::suspend`] has stopped.
    pub fn resume(&self) {
        let pid = Pid::from_child(
            self.child
                .as_ref()
                .expect("tmemd was not started or has already ended"),
        );
        kill_process(pid, Signal::CONT).unwrap();
    }

    /// Returns the resources that the daemon uses now.
    pub fn taken(&self) -> Taken {
        taken_by(
            self.child
                .as_ref()
                .expect("tmemd was not started or has already ended")
                .id() as i32,
        )
    }

    /// Panics if the daemon has ended. The panic makes the test print the daemon's log.
    pub fn expect_alive(&mut self) {
        let status = self
            .child
            .as_mut()
            .expect("tmemd was not started or has already ended")
            .try_wait()
            .unwrap();
        assert_eq!(status, None, "tmemd ended before the test stopped it");
    }

    /// Polls `check` until it returns true. Panics with the text `what` if the daemon ends or after
    /// the time limit [`TIMEOUT`]. The panic makes the test print the daemon's log.
    pub fn until(&mut self, what: &str, mut check: impl FnMut() -> bool) {
        until(what, || {
            check() || {
                self.expect_alive();
                false
            }
        });
    }

    /// Connects a driver to the socket of its VM. The daemon accepts one connection at a time for
    /// each VM. So the function tries again while an earlier connection exists, which an earlier
    /// driver or [`Self::spawn`] made.
    pub fn connect(&mut self, driver: &mut Driver, name: &str) {
        let socket = self.socket(name);
        let guest = &mut driver.guest;
        self.until("the VM's socket is free", || guest.connect(&socket).is_ok());
        driver.start().unwrap();
    }

    /// Returns the connected driver of a guest `name` with the default configuration.
    pub fn driver(&mut self, name: &str, seed: u64) -> Driver {
        self.driver_with(
            guest(name),
            DriverConfig {
                seed,
                ..DriverConfig::default()
            },
        )
    }

    /// Returns the connected driver of a guest with the configuration `guest`.
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

/// Numbers of resources that a process uses.
#[derive(Clone, Copy, Debug)]
pub struct Taken {
    /// Process id of the process that uses the resources.
    pub pid: i32,
    /// Number of threads of the process.
    pub threads: usize,
    /// Number of open file descriptors of the process.
    pub descriptors: usize,
    /// Number of mappings in the address space of the process.
    pub mappings: usize,
    /// Resident anonymous memory of the process in bytes. Guest memory is shared and does not
    /// count.
    pub memory_bytes: usize,
}

impl Taken {
    /// Returns the larger number of `self` and `other` for each resource.
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

/// Returns the resources that the process `pid` uses now.
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

/// Raises this process's limit of open files, for guests with a file for each of many regions.
pub fn allow_many_files() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let limit = Rlimit {
        current: maximum,
        maximum,
    };
    setrlimit(Resource::Nofile, limit).unwrap();
}

/// Returns the default configuration of a simulated guest, with the name `name`.
pub fn guest(name: &str) -> GuestConfig {
    GuestConfig {
        name: name.into(),
        ..GuestConfig::default()
    }
}

/// Returns the seed of a random test and prints it. The environment variable TMEM_SEED sets the
/// seed, for example to repeat a run. Without it, each run has a new seed.
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

/// Sends `steps` random requests of a guest, and checks the daemon's answers with the driver's
/// model.
pub fn work(driver: &mut Driver, steps: usize) {
    for _ in 0..steps {
        driver.step().unwrap();
    }
    driver.settle().unwrap();
}

/// Sends one request on each queue of a guest, and checks that the daemon answers it.
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
    let report = Request::Report(Box::new([0; tmem_model::requests::REPORT_BYTES]));
    assert!(driver.send(wire::CONTROL_QUEUE, report, vec![]));
    driver.settle().unwrap();
}
