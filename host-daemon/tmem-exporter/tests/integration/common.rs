// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A daemon with simulated guests, and an exporter that serves the daemon's figures, for tests.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tmem_control::VarlinkClientInterface;
use tmem_model::{Driver, DriverConfig, GuestConfig, TestDaemon};

/// Longest time that a test waits for a result. It is long, so that no wait fails on a loaded
/// machine.
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// A daemon with the VMs `a` and `b`. Only a guest of VM `a` is connected.
pub struct ServedDaemon {
    daemon: TestDaemon,
    driver: Driver,
}

impl ServedDaemon {
    /// Starts a daemon with the VMs `a` and `b`, and connects a simulated guest as VM `a`.
    pub fn new() -> ServedDaemon {
        ServedDaemon::with_more(0)
    }

    /// Starts a daemon with `more` VMs besides `a` and `b`. The further VMs have no guest.
    pub fn with_more(more: usize) -> ServedDaemon {
        let more = (0..more).map(|nr| format!("more{nr}"));
        let vms: Vec<String> = [
            "a,uuid=01234567-89ab-cdef-0123-456789abcdef,limit=64MiB".into(),
            "b".into(),
        ]
        .into_iter()
        .chain(more)
        .collect();
        let vms: Vec<&str> = vms.iter().map(String::as_str).collect();
        let daemon = TestDaemon::start(&vms);
        let guest = GuestConfig {
            name: "a".into(),
            ..GuestConfig::default()
        };
        let mut driver =
            Driver::new(guest, DriverConfig::default()).expect("cannot create the simulated guest");
        driver
            .connect(&daemon.path("a.sock"))
            .expect("cannot connect to the VM's socket");
        ServedDaemon { daemon, driver }
    }

    /// Returns the path of the file `name` in the daemon's directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.daemon.path(name)
    }

    /// Sends `steps` random requests of the guest to the daemon, and checks the answers.
    pub fn work(&mut self, steps: usize) {
        for _ in 0..steps {
            self.driver
                .step()
                .expect("the device did not answer each request correctly");
        }
        self.driver
            .settle()
            .expect("the device did not answer each request correctly");
    }

    /// Returns the figures that the daemon counts for a VM.
    pub fn stats(&self, vm: &str) -> tmem_control::VmStats {
        let mut client = tmem_control::connect(&self.path("control"))
            .expect("cannot connect to the control socket");
        let reply = client
            .get_stats(Some(vm.into()))
            .call()
            .expect("the daemon answered the varlink call with an error");
        reply
            .vms
            .into_iter()
            .next()
            .expect("the daemon does not list the VM")
    }

    /// Stops the daemon. The simulated guest loses its connection.
    pub fn stop(&mut self) {
        self.daemon.stop();
    }
}

/// A process of tmem-exporter. Dropping this value stops the process.
pub struct Exporter {
    child: Child,
    address: String,
}

impl Exporter {
    /// Starts tmem-exporter on a free port, with the options `more`.
    pub fn start(host: &ServedDaemon, more: &[&str]) -> Exporter {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tmem-exporter"));
        if !more.contains(&"--web.listen-address") {
            command.args(["--web.listen-address", "127.0.0.1:0"]);
        }
        command
            .arg("--socket")
            .arg(host.path("read-only"))
            .args(more)
            .stderr(Stdio::piped());
        let mut child = command.spawn().expect("cannot run the program");
        let mut lines =
            BufReader::new(child.stderr.take().expect("the child process has no pipe")).lines();
        let mut log = String::new();
        let address = loop {
            let line = lines
                .next()
                .unwrap_or_else(|| panic!("the exporter ended before it listened: {log}"))
                .expect("the exporter's log does not give its address");
            if let Some((_, rest)) = line.split_once("://") {
                let (address, _) = rest
                    .split_once("/metrics")
                    .expect("the exporter's log does not give its address");
                break address.to_string();
            }
            log += &line;
        };
        // A thread reads the other lines of the exporter's log, so that the exporter does not block
        // on a full pipe.
        std::thread::spawn(move || lines.for_each(drop));
        Exporter { child, address }
    }

    /// Returns the address and port on which the exporter listens.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Requests `path` from the exporter, and returns the head and the body of the answer.
    pub fn get(&self, path: &str, headers: &str) -> (String, String) {
        http(
            &self.address,
            &format!("GET {path} HTTP/1.1\r\nHost: x\r\n{headers}\r\n"),
        )
    }

    /// Returns the metrics of the exporter. Any HTTP status but 200 fails the test.
    pub fn metrics(&self, headers: &str) -> String {
        let (head, body) = self.get("/metrics", headers);
        assert!(
            head.starts_with("HTTP/1.1 200 "),
            "the HTTP response does not have status 200: {head}"
        );
        body
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        // Killing fails if the exporter has already ended, so the error is ignored.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sends an HTTP request without TLS. Returns the head and the body of the answer, or as much of
/// them as arrived.
pub fn http(address: &str, request: &str) -> (String, String) {
    let begun = Instant::now();
    let mut stream = loop {
        match TcpStream::connect(address) {
            Ok(stream) => break stream,
            Err(error) => assert!(
                begun.elapsed() < TIMEOUT,
                "the exporter did not answer in time: {error}"
            ),
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    stream
        .set_read_timeout(Some(TIMEOUT))
        .expect("cannot set the socket's time-out");
    // Writing fails if the exporter closes the connection before it has read the whole request.
    let _ = stream.write_all(request.as_bytes());
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    let answer = String::from_utf8(answer).expect("the answer of the exporter is not UTF-8");
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    (head.into(), body.into())
}

/// A self-signed certificate for 127.0.0.1 and its private key, in a directory of their own.
pub struct Certificate {
    directory: PathBuf,
}

impl Certificate {
    /// Creates a certificate and its private key, as files in `directory`.
    pub fn new(directory: PathBuf) -> Certificate {
        let certificate = Certificate { directory };
        certificate.renew();
        certificate
    }

    /// Replaces the certificate and its private key by new ones.
    pub fn renew(&self) {
        std::fs::create_dir_all(&self.directory).expect("cannot create the directory");
        let request = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=test \
            -addext basicConstraints=CA:FALSE -addext subjectAltName=IP:127.0.0.1";
        let mut command = Command::new("openssl");
        command.args(request.split_whitespace()).arg("-keyout");
        let done = command
            .arg(self.key())
            .arg("-out")
            .arg(self.certificate())
            .output();
        let done = done.expect("cannot run openssl: scripts/deps test installs it");
        assert!(done.status.success(), "openssl failed: {done:?}");
    }

    /// Returns the path of the certificate's file.
    pub fn certificate(&self) -> PathBuf {
        self.directory.join("certificate.pem")
    }

    /// Returns the path of the private key's file.
    pub fn key(&self) -> PathBuf {
        self.directory.join("key.pem")
    }

    /// Writes a file for --web.config.file, with `more` as further lines, and returns its path.
    pub fn web_config(&self, more: &str) -> PathBuf {
        let path = self.directory.join("web.yml");
        let text = format!(
            "tls_server_config:\n  cert_file: certificate.pem\n  key_file: key.pem\n{more}"
        );
        std::fs::write(&path, text).expect("cannot write the file");
        path
    }
}
