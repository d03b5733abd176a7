// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `top` in a real terminal of 80 × 24: tmux is one that a test can read. `make check-ops` runs this.

use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};
use tmemd::{Config, Daemon};

/// Long enough for a loaded machine; nothing here is measured.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A tmux server of its own, which ends with the test.
struct Tmux(std::path::PathBuf);

impl Tmux {
    fn run(&self, arguments: &[&str]) -> String {
        let mut command = Command::new("tmux");
        command
            .env_remove("TMUX")
            .env("LC_ALL", "C.UTF-8")
            .arg("-u")
            .arg("-S")
            .arg(&self.0);
        let output = command
            .args(arguments)
            .output()
            .expect("tmux, of Debian's package");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    fn screen(&self) -> String {
        self.run(&["capture-pane", "-p", "-t", "top"])
    }

    fn until(&self, what: &str, check: impl Fn(&str) -> bool) -> String {
        let begun = Instant::now();
        loop {
            let screen = self.screen();
            if check(&screen) {
                return screen;
            }
            assert!(
                begun.elapsed() < TIMEOUT,
                "waited in vain for {what}:\n{screen}"
            );
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

impl Drop for Tmux {
    fn drop(&mut self) {
        self.run(&["kill-server"]);
    }
}

fn daemon(folder: &Path) -> Daemon {
    let vm = |name: &str| {
        let text = format!("socket={}/{name}.sock,name={name}", folder.display());
        text.parse().expect("good")
    };
    let config = Config {
        pool_size_bytes: 64 << 20,
        workers: 1,
        waiting: Default::default(),
        vm_pages_per_second: 0,
        control: folder.join("control"),
        control_group: None,
        control_read_only: Some(folder.join("read-only")),
        control_read_only_group: None,
        run_folder: folder.into(),
        vms: vec![vm("web"), vm("db")],
        pressure: None,
        trace: None,
    };
    Daemon::start(config).expect("starts")
}

/// top of the daemon at that socket, in a screen of its own.
fn start(folder: &Path, socket: &str, options: &str) -> Tmux {
    // A server that ends keeps its socket for a while.
    let tmux = Tmux(
        tempfile::tempdir_in(folder)
            .expect("a folder")
            .keep()
            .join("tmux"),
    );
    let top = format!(
        "{} --socket {}/{socket} {options} top; echo ended with $?; exec sleep 600",
        env!("CARGO_BIN_EXE_tmemctl"),
        folder.display()
    );
    let session = ["new-session", "-d", "-s", "top", "-x", "80", "-y", "24"];
    tmux.run(&[&["-f", "/dev/null"], &session[..], &[&top]].concat());
    tmux
}

#[test]
#[ignore = "needs tmux: make check-ops"]
fn top_lives_in_a_terminal() {
    let folder = tempfile::tempdir().expect("a folder");
    let daemon = daemon(folder.path());
    let tmux = start(folder.path(), "read-only", "");
    let screen = tmux.until("its view", |screen| screen.contains("of 64.0 MiB held"));
    let lines: Vec<&str> = screen.lines().collect();
    assert_eq!(lines.len(), 24, "{screen}");
    assert!(
        lines[0].starts_with("tmemd ") && lines[0].contains("0 of 2 VMs connected"),
        "{screen}"
    );
    let place = |name: &str| lines.iter().position(|line| line.starts_with(name));
    assert!(
        place("-db") < place("-web") && place("-db").is_some(),
        "{screen}"
    );
    assert!(lines[23].starts_with("q quit"), "{screen}");
    tmux.run(&["send-keys", "-t", "top", "/we"]);
    tmux.until("the filter", |screen| {
        screen.contains("filter: we_") && !screen.contains("-db")
    });
    tmux.run(&["send-keys", "-t", "top", "Enter"]);
    tmux.run(&["send-keys", "-t", "top", "?"]);
    tmux.until("the help", |screen| screen.contains("order by name"));
    // A daemon that goes is said, and the view stays.
    daemon.stop();
    tmux.until("the problem", |screen| {
        screen.contains("there is no control socket") && screen.contains("-web")
    });
    tmux.run(&["send-keys", "-t", "top", "q"]);
    let screen = tmux.until("its end", |screen| screen.contains("ended with 0"));
    assert!(
        !screen.contains("tmemd "),
        "the terminal is as it was: {screen}"
    );
}

/// A signal ends it as a key does, and a daemon that hangs keeps it from neither.
#[test]
#[ignore = "needs tmux: make check-ops"]
fn the_terminal_is_given_back() {
    let folder = tempfile::tempdir().expect("a folder");
    let daemon = daemon(folder.path());
    let path = |name: &str| folder.path().join(name);
    // It leads to the daemon at first, and then to one that takes nobody in.
    symlink(path("read-only"), path("control-of-top")).expect("linked");
    let hangs = UnixListener::bind(path("hangs")).expect("binds");
    hangs.set_nonblocking(true).expect("set");
    for end in ["a key", "a signal", "no terminal"] {
        let tmux = start(folder.path(), "control-of-top", "--timeout 3600");
        tmux.until("its view", |screen| screen.contains("of 64.0 MiB held"));
        symlink(path("hangs"), path("new")).expect("linked");
        std::fs::rename(path("new"), path("control-of-top")).expect("replaced");
        // Time for three looks.
        std::thread::sleep(Duration::from_secs(3));
        let waiting = std::iter::from_fn(|| hangs.accept().ok()).collect::<Vec<_>>();
        assert_eq!(
            waiting.len(),
            2,
            "one that tried whether it is there, and one look"
        );
        let shell = tmux.run(&["display-message", "-p", "-t", "top", "#{pane_pid}"]);
        let children = format!("/proc/{0}/task/{0}/children", shell.trim());
        let top = std::fs::read_to_string(children).expect("top");
        let top = top.trim();
        match end {
            "a key" => drop(tmux.run(&["send-keys", "-t", "top", "q"])),
            "a signal" => {
                let killed = Command::new("kill").arg(top).status();
                assert!(killed.expect("runs").success());
            }
            _ => drop(tmux.run(&["kill-server"])),
        }
        if end == "no terminal" {
            let begun = Instant::now();
            while Path::new("/proc").join(top).exists() {
                assert!(begun.elapsed() < TIMEOUT, "process {top} goes on");
                std::thread::sleep(Duration::from_millis(100));
            }
        } else {
            let screen = tmux.until("its end", |screen| screen.contains("ended with 0"));
            assert!(!screen.contains("tmemd "), "as it was: {screen}");
        }
        symlink(path("read-only"), path("new")).expect("linked");
        std::fs::rename(path("new"), path("control-of-top")).expect("replaced");
    }
    daemon.stop();
}
