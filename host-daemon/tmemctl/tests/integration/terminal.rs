// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of `tmemctl top` in a terminal of 80 × 24 characters. The terminal is tmux, because a
//! test can read its screen. `make shard NAME=ops` runs these tests.

use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tmem_control::VarlinkClientInterface;
use tmem_model::{Driver, DriverConfig, GuestConfig, TestDaemon};

/// Longest time that a test waits for text on the screen. A long limit does no harm on a loaded
/// machine, because no test measures a time.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A tmux server of one test, at the socket with this path. It ends with the test.
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
            .expect("cannot run tmux (Debian package tmux)");
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
                "timeout while waiting for {what}:\n{screen}"
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

/// A simulated guest that sends puts and gets until [`Guest::stop`].
struct Guest {
    stop: Arc<AtomicBool>,
    works: JoinHandle<Driver>,
}

impl Guest {
    /// Connects a simulated guest to the socket of the VM `name`, and starts its requests.
    fn start(directory: &Path, name: &str) -> Guest {
        let guest = GuestConfig {
            name: name.into(),
            ..GuestConfig::default()
        };
        let mut driver =
            Driver::new(guest, DriverConfig::default()).expect("cannot create the simulated guest");
        let socket = directory.join(format!("{name}.sock"));
        driver
            .connect(&socket)
            .expect("cannot connect to the VM's socket");
        let stop: Arc<AtomicBool> = Arc::default();
        let works = std::thread::spawn({
            let stop = stop.clone();
            move || {
                while !stop.load(Ordering::Relaxed) {
                    driver
                        .step()
                        .expect("the device did not answer each request correctly");
                }
                driver
                    .settle()
                    .expect("the device did not answer each request correctly");
                driver
            }
        });
        Guest { stop, works }
    }

    /// Stops the requests of the guest. The returned driver stays connected to the daemon.
    fn stop(self) -> Driver {
        self.stop.store(true, Ordering::Relaxed);
        self.works
            .join()
            .expect("the device did not answer each request correctly")
    }
}

/// Returns the cells of a VM's row in the screen of `top`, without units: name, hits in percent,
/// reads avoided, gets, time of a GET, puts, time of a PUT, used, entitled.
fn cells(screen: &str, name: &str) -> Option<Vec<String>> {
    let row = screen.lines().find(|line| line.starts_with(name))?;
    let words = row.split_whitespace();
    let values = words.filter(|word| !["%", "µs", "ms", "B", "KiB", "MiB"].contains(word));
    Some(values.map(String::from).collect())
}

/// Parses a rate as `top` displays it, for example 1.5k.
fn rate(cell: &str) -> f64 {
    let number = cell.trim_end_matches(['k', 'M']);
    let of = match &cell[number.len()..] {
        "k" => 1e3,
        "M" => 1e6,
        _ => 1.0,
    };
    number.parse::<f64>().map_or(0.0, |number| number * of)
}

/// Starts `tmemctl top` for the daemon's socket `socket` in a new tmux server.
fn start(directory: &Path, socket: &str, options: &str) -> Tmux {
    // A tmux server keeps its socket for a while after its end, so each server gets a new
    // directory.
    let tmux = Tmux(
        tempfile::tempdir_in(directory)
            .expect("cannot create a temporary directory")
            .keep()
            .join("tmux"),
    );
    let top = format!(
        "{} --socket {}/{socket} {options} top; echo ended with $?; exec sleep 600",
        env!("CARGO_BIN_EXE_tmemctl"),
        directory.display()
    );
    let session = ["new-session", "-d", "-s", "top", "-x", "80", "-y", "24"];
    tmux.run(&[&["-f", "/dev/null"], &session[..], &[&top]].concat());
    tmux
}

#[test]
#[ignore = "needs tmux: make shard NAME=ops"]
fn top_shows_rates_and_obeys_keys_in_a_terminal() {
    let mut daemon = TestDaemon::start(&["web", "db"]);
    let directory = daemon.folder().to_path_buf();
    let guest = Guest::start(&directory, "web");
    let tmux = start(&directory, "read-only", "");
    // `top` shows rates after its second poll of the daemon. The guest must send requests between
    // the first and the second poll.
    let screen = tmux.until("the rates of VM web", |screen| {
        cells(screen, " web").is_some_and(|cells| {
            cells.len() >= 10 && [2, 3, 5].iter().all(|&nth| rate(&cells[nth]) > 0.0)
        })
    });
    let web = cells(&screen, " web").expect("the screen has no row of VM web");
    let hits: f64 = web[1].parse().expect("the cell is not a percentage");
    let part = rate(&web[2]) / rate(&web[3]) * 100.0;
    assert!(
        (hits - part).abs() < 2.0,
        "the hit rate differs from {part} %: {screen}"
    );
    assert!(
        web[4].parse::<f64>().is_ok_and(|time| time > 0.0),
        "the latency is not positive: {screen}"
    );
    assert!(
        web[6].parse::<f64>().is_ok_and(|time| time > 0.0),
        "the driver's latency is not positive: {screen}"
    );
    assert!(
        web[7].parse::<f64>().is_ok_and(|used| used > 0.0),
        "the used memory is not positive: {screen}"
    );
    assert!(
        web.concat().contains('█'),
        "the row has no bar of gets: {screen}"
    );
    let lines: Vec<&str> = screen.lines().collect();
    assert_eq!(
        lines.len(),
        24,
        "the screen does not have 24 lines: {screen}"
    );
    assert!(
        lines[0].starts_with("tmemd ") && lines[0].contains("1 of 2 VMs connected"),
        "the first line has the wrong text: {screen}"
    );
    let place = |name: &str| lines.iter().position(|line| line.starts_with(name));
    assert!(
        place(" web") < place("-db") && place(" web").is_some(),
        "the busy VM is not above the idle one: {screen}"
    );
    assert_eq!(
        cells(&screen, "-db").map(|cells| cells[1..5].to_vec()),
        Some(["-", "0", "0", "-"].map(String::from).to_vec()),
        "the row of the idle VM has the wrong cells: {screen}"
    );
    assert!(
        lines[23].starts_with("q quit"),
        "the key help is not in the last line: {screen}"
    );
    tmux.run(&["send-keys", "-t", "top", "/we"]);
    tmux.until("the filtered table", |screen| {
        screen.contains("filter: we_") && !screen.contains("-db")
    });
    // The totals that `top` displays for the selected VM equal the daemon's counters.
    let guest = guest.stop();
    let mut client = tmem_control::connect(&directory.join("control"))
        .expect("cannot connect to the control socket");
    let stats = client
        .get_stats(Some("web".into()))
        .call()
        .expect("the daemon answered the varlink call with an error");
    let [vm] = &stats.vms[..] else {
        panic!("the daemon did not return exactly one VM: {stats:?}")
    };
    let of_all = format!("{} gets, {} hits (", vm.gets, vm.hits);
    tmux.until("the totals of VM web", |screen| screen.contains(&of_all));
    tmux.run(&["send-keys", "-t", "top", "Enter"]);
    tmux.run(&["send-keys", "-t", "top", "?"]);
    tmux.until("the help text", |screen| screen.contains("order by name"));
    // When the daemon has stopped, `top` reports it and still shows the figures of the last poll.
    daemon.stop();
    drop(guest);
    tmux.until("the report that the daemon has stopped", |screen| {
        screen.contains("there is no control socket") && cells(screen, " web").is_some()
    });
    tmux.run(&["send-keys", "-t", "top", "q"]);
    let screen = tmux.until("the end of tmemctl top", |screen| {
        screen.contains("ended with 0")
    });
    assert!(
        !screen.contains("tmemd "),
        "tmemctl did not restore the terminal: {screen}"
    );
}

/// A key, a signal or the end of the terminal ends `tmemctl top`, even if the daemon hangs.
#[test]
#[ignore = "needs tmux: make shard NAME=ops"]
fn top_restores_the_terminal_at_its_end() {
    let mut daemon = TestDaemon::start(&["web", "db"]);
    let directory = daemon.folder().to_path_buf();
    let path = |name: &str| directory.join(name);
    // The symbolic link control-of-top first names the daemon's socket. Later it names a socket
    // whose connections no process accepts.
    symlink(path("read-only"), path("control-of-top")).expect("cannot create the symbolic link");
    let hangs = UnixListener::bind(path("hangs")).expect("cannot bind the socket");
    hangs
        .set_nonblocking(true)
        .expect("cannot make the socket nonblocking");
    for end in ["a key", "a signal", "no terminal"] {
        let tmux = start(&directory, "control-of-top", "--timeout 3600");
        tmux.until("the view of tmemctl top", |screen| {
            screen.contains("of 64.0 MiB held")
        });
        symlink(path("hangs"), path("new")).expect("cannot create the symbolic link");
        std::fs::rename(path("new"), path("control-of-top")).expect("cannot rename the file");
        // During these 3 s, `top` would poll the daemon three times if no poll were hanging.
        std::thread::sleep(Duration::from_secs(3));
        let waiting = std::iter::from_fn(|| hangs.accept().ok()).collect::<Vec<_>>();
        assert_eq!(
            waiting.len(),
            2,
            "tmemctl top did not make exactly 2 connections: one that tests the socket, and one that \
             reads the statistics"
        );
        let shell = tmux.run(&["display-message", "-p", "-t", "top", "#{pane_pid}"]);
        let children = format!("/proc/{0}/task/{0}/children", shell.trim());
        let top = std::fs::read_to_string(children)
            .expect("cannot list the child processes of the shell");
        let top = top.trim();
        match end {
            "a key" => drop(tmux.run(&["send-keys", "-t", "top", "q"])),
            "a signal" => {
                let killed = Command::new("kill").arg(top).status();
                assert!(killed.expect("cannot run kill").success());
            }
            _ => drop(tmux.run(&["kill-server"])),
        }
        if end == "no terminal" {
            let begun = Instant::now();
            while Path::new("/proc").join(top).exists() {
                assert!(begun.elapsed() < TIMEOUT, "process {top} did not end");
                std::thread::sleep(Duration::from_millis(100));
            }
        } else {
            let screen = tmux.until("the end of tmemctl top", |screen| {
                screen.contains("ended with 0")
            });
            assert!(
                !screen.contains("tmemd "),
                "tmemctl did not restore the terminal: {screen}"
            );
        }
        symlink(path("read-only"), path("new")).expect("cannot create the symbolic link");
        std::fs::rename(path("new"), path("control-of-top")).expect("cannot rename the file");
    }
    daemon.stop();
}
