// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of the messages that the daemon sends to the service manager: that it serves, is alive,
//! stops, or hangs. The daemon hangs if at least one of its threads hangs. Each test takes the
//! place of the service manager, and listens on the socket that NOTIFY_SOCKET names.

use crate::common::Daemon;
use rustix::process::{Pid, Signal, kill_process};
use std::io::Write;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

/// Watchdog period: the daemon must report more often that it is alive. The period is short, so
/// that the tests are short. It is long compared with the time for which a busy machine delays a
/// thread.
const PERIOD: Duration = Duration::from_secs(2);

const LIVES: &str = "WATCHDOG=1";
const HANGS: &str = "WATCHDOG=trigger";

/// Starts a daemon that reports to a service manager. Returns the daemon, and the socket on which
/// the test receives the reports.
fn watched(vms: &[(&str, Option<&str>)]) -> (Daemon, UnixDatagram) {
    watched_with(vms, |_| ())
}

/// Starts a daemon as [`watched`] does, after a call of `prepare` with the path of the socket.
fn watched_with(
    vms: &[(&str, Option<&str>)],
    prepare: impl FnOnce(&Path),
) -> (Daemon, UnixDatagram) {
    let mut manager = None;
    let daemon = Daemon::with_environment(vms, |directory| {
        let path = directory.join("notify");
        let socket = UnixDatagram::bind(&path).expect("cannot bind the socket");
        socket
            .set_read_timeout(Some(crate::common::TIMEOUT))
            .expect("cannot set the socket's time-out");
        prepare(&path);
        manager = Some(socket);
        vec![
            ("NOTIFY_SOCKET".into(), path.display().to_string()),
            ("WATCHDOG_USEC".into(), PERIOD.as_micros().to_string()),
        ]
    });
    (
        daemon,
        manager.expect("Daemon::with_environment() returned without a call of its closure"),
    )
}

/// Receives the daemon's next message to the service manager.
fn hear(manager: &UnixDatagram) -> String {
    let mut word = [0; 256];
    let length = manager
        .recv(&mut word)
        .expect("the daemon sent no notification");
    std::str::from_utf8(&word[..length])
        .expect("the text is not UTF-8")
        .trim()
        .into()
}

/// Checks for the time `time` that the daemon sends only messages that say that it is alive.
fn lives_for(manager: &UnixDatagram, time: Duration) {
    let end = Instant::now() + time;
    while Instant::now() < end {
        assert_eq!(hear(manager), LIVES);
    }
}

#[test]
fn the_service_manager_is_notified_of_start_progress_and_stop() {
    let (mut daemon, manager) = watched(&[("a", None)]);
    assert_eq!(hear(&manager), "READY=1");
    UnixStream::connect(daemon.socket("a")).expect("cannot connect to the socket");
    let begun = Instant::now();
    for _ in 0..4 {
        assert_eq!(hear(&manager), LIVES);
    }
    assert!(
        begun.elapsed() < 4 * PERIOD,
        "four notifications took longer than four periods"
    );
    let mut driver = daemon.driver("a", 1);
    crate::common::work(&mut driver, 300);
    // The service manager reads messages while the daemon stops. Its queue may be full, and has room
    // for ten messages only.
    let manager = std::thread::spawn(move || {
        let mut messages = std::iter::repeat_with(|| hear(&manager));
        messages.find(|message| message != LIVES)
    });
    daemon.terminate();
    let last = manager.join().expect("the daemon sent no other message");
    assert_eq!(last.as_deref(), Some("STOPPING=1"));
}

/// A signal, such as that for a reload, interrupts the daemon while it waits for room in the service
/// manager's queue. The daemon must send READY=1 nevertheless, because it sends this message once.
#[test]
fn a_signal_does_not_lose_the_message_that_the_daemon_is_ready() {
    let (mut daemon, manager) = watched_with(&[("a", None)], |path| {
        let sender = UnixDatagram::unbound().expect("cannot create a socket");
        sender
            .set_nonblocking(true)
            .expect("cannot make the socket non-blocking");
        while sender.send_to(b"x", path).is_ok() {}
    });
    // proc_pid_syscall(5): the number of the system call in which the main thread waits, and its
    // arguments. The third one is the length of the message.
    let call = libc::SYS_write.to_string();
    let length = format!("{:#x}", "READY=1".len());
    let pid = daemon.pid();
    daemon.until("the daemon waits for room in the queue", || {
        let found = std::fs::read_to_string(format!("/proc/{pid}/syscall"))
            .expect("cannot read the system call of the daemon");
        let words: Vec<&str> = found.split_whitespace().collect();
        words[0] == call && words.get(3) == Some(&length.as_str())
    });
    let process = Pid::from_raw(pid as i32).expect("the process id is 0");
    kill_process(process, Signal::HUP).expect("cannot send the signal to the daemon");
    // A daemon that has lost READY=1 sends LIVES only.
    let messages = std::iter::repeat_with(|| hear(&manager)).filter(|message| message != "x");
    let first = messages.take(5).find(|message| message != LIVES);
    assert_eq!(first.as_deref(), Some("READY=1"));
}

#[test]
fn a_service_manager_that_reads_nothing_does_not_keep_the_daemon_from_stopping() {
    let (mut daemon, manager) = watched(&[("a", None)]);
    assert_eq!(hear(&manager), "READY=1");
    let sender = UnixDatagram::unbound().expect("cannot create a socket");
    sender
        .set_nonblocking(true)
        .expect("cannot make the socket non-blocking");
    while sender.send_to(b"x", daemon.path("notify")).is_ok() {}
    let process = Pid::from_raw(daemon.pid() as i32).expect("the process id is 0");
    kill_process(process, Signal::TERM).expect("cannot stop the daemon");
    // The daemon is a zombie process until the test waits for it.
    crate::common::until("the daemon ends", || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", process.as_raw_pid()));
        stat.is_ok_and(|stat| stat.contains(") Z "))
    });
    daemon.terminate();
}

/// A thread that waits for a request or a message does not count as hung. The workers of an idle
/// daemon wait for requests. If a front end sends half a message, or none, the thread of its
/// connection waits for the rest.
#[test]
fn threads_that_wait_for_clients_do_not_count_as_hung() {
    let (mut daemon, manager) = watched(&[("idle", None), ("half", None), ("silent", None)]);
    // The workers have served requests of this VM, and are idle from here on.
    let mut driver = daemon.driver("idle", 1);
    crate::common::work(&mut driver, 50);
    let mut half =
        UnixStream::connect(daemon.socket("half")).expect("cannot connect to the socket");
    half.write_all(&[1, 0, 0, 0, 1])
        .expect("cannot send half a message header");
    let _silent =
        UnixStream::connect(daemon.socket("silent")).expect("cannot connect to the socket");
    assert_eq!(hear(&manager), "READY=1");
    lives_for(&manager, 2 * PERIOD);
}

/// A thread that the test stops with ptrace(2), as a debugger does, until this value is dropped.
/// Without a bug in the daemon, no other way is known to make one of its threads hang.
struct Stopped(libc::pid_t);

impl Stopped {
    fn new(thread: libc::pid_t) -> Stopped {
        let nothing = std::ptr::null_mut::<libc::c_void>();
        // SAFETY: the only memory that the calls refer to is the status, which outlives them.
        unsafe {
            assert_eq!(
                libc::ptrace(libc::PTRACE_SEIZE, thread, nothing, nothing),
                0
            );
            assert_eq!(
                libc::ptrace(libc::PTRACE_INTERRUPT, thread, nothing, nothing),
                0
            );
            let mut status = 0;
            assert_eq!(libc::waitpid(thread, &mut status, libc::__WALL), thread);
        }
        Stopped(thread)
    }

    /// Returns whether the thread was stopped outside of a system call. An idle worker waits in one.
    fn was_busy(&self) -> bool {
        let call = std::fs::read_to_string(format!("/proc/{}/syscall", self.0));
        call.is_ok_and(|call| call.starts_with("-1"))
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        let nothing = std::ptr::null_mut::<libc::c_void>();
        // SAFETY: the call refers to no memory of this process.
        unsafe { libc::ptrace(libc::PTRACE_DETACH, self.0, nothing, nothing) };
    }
}

fn workers(daemon: &Daemon) -> Vec<libc::pid_t> {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", daemon.pid()))
        .expect("tmemd was not started or has already ended");
    let named = tasks
        .map(|task| task.expect("cannot read a directory entry"))
        .filter(|task| {
            let name = std::fs::read_to_string(task.path().join("comm"));
            name.is_ok_and(|name| name.starts_with("worker-"))
        });
    let number = |task: std::fs::DirEntry| task.file_name().to_str()?.parse().ok();
    named.filter_map(number).collect()
}

#[test]
fn a_hung_worker_is_reported() {
    let (mut daemon, manager) = watched(&[("a", None)]);
    let mut driver = daemon.driver("a", 1);
    assert_eq!(hear(&manager), "READY=1");
    let begun = Instant::now();
    let stopped = loop {
        assert!(
            begun.elapsed() < 4 * crate::common::TIMEOUT,
            "the daemon did not report the hang in time"
        );
        // These requests keep the workers busy for some milliseconds. The test must stop a worker
        // in that time, because an idle worker does not count as hung. A worker that ended its work
        // just before it was stopped may look busy, so the test tries again if no report comes.
        for object in 1..=20 {
            driver.put(object, 0, 64);
        }
        let stopped: Vec<Stopped> = workers(&daemon).into_iter().map(Stopped::new).collect();
        let busy = stopped.iter().any(Stopped::was_busy);
        if busy && (0..16).any(|_| hear(&manager) == HANGS) {
            break stopped;
        }
        drop(stopped);
        driver
            .settle()
            .expect("the released workers did not continue");
    };
    assert_eq!(hear(&manager), HANGS, "the daemon did not report the hang");
    let log = std::fs::read_to_string(daemon.path("log")).expect("cannot read the log");
    // The log line may name other threads before the worker: a background worker that waits for a
    // lock of the stopped worker hangs, too.
    let names_worker =
        |line: &str| line.contains("threads of the daemon hang: ") && line.contains("worker-");
    assert!(
        log.lines().any(names_worker),
        "the log does not name the hanging worker: {log}"
    );
    // The service manager may leave the daemon running. The daemon then continues as soon as the
    // stopped thread runs again.
    drop(stopped);
    driver
        .settle()
        .expect("the released workers did not continue");
    while hear(&manager) == HANGS {}
    lives_for(&manager, PERIOD);
}
