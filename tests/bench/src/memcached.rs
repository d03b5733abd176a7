// SPDX-License-Identifier: Apache-2.0 OR MIT
//! memcached with one thread, used over a Unix socket. The benchmark compares the daemon with it,
//! because it is a common program for a shared cache. The benchmark writes and reads batches of
//! pages with pipelined requests, as clients of memcached do.

use rustix::thread::Pid;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tmem_pool::{PAGE_SIZE, Page};

/// Longest time that the benchmark waits until memcached accepts connections.
const START_MAX: Duration = Duration::from_secs(5);

/// A memcached server process, which is killed when this object is dropped.
pub struct Memcached {
    child: Child,
    stream: UnixStream,
    answers: BufReader<UnixStream>,
    buffer: Vec<u8>,
    socket: std::path::PathBuf,
}

impl Memcached {
    /// Starts memcached with `bytes` bytes of memory for pages.
    ///
    /// # Errors
    /// memcached cannot be started. The error gives the reason.
    pub fn new(bytes: usize) -> Result<Memcached, String> {
        let socket = std::env::temp_dir().join(format!("tmem-bench-{}.sock", std::process::id()));
        // memcached refuses to run as root unless the option -u names another user.
        let user = match rustix::process::geteuid().is_root() {
            true => vec!["-u", "nobody"],
            false => vec![],
        };
        let mut child = Command::new("memcached")
            .args([
                "-t",
                "1",
                "-a",
                "0777",
                "-m",
                &(bytes >> 20).to_string(),
                "-s",
            ])
            .arg(&socket)
            .args(user)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| format!("cannot start memcached: {error}"))?;
        let begun = Instant::now();
        let stream = loop {
            match UnixStream::connect(&socket) {
                Ok(stream) => break stream,
                Err(_) if begun.elapsed() < START_MAX => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                Err(error) => {
                    // memcached did not accept a connection, so no code needs the process. Errors
                    // of these calls do not matter.
                    let _ = child.kill();
                    let _ = child.wait();
                    return Err(format!(
                        "cannot connect to memcached at {}: {error}",
                        socket.display()
                    ));
                }
            }
        };
        let same = stream.try_clone().map_err(|error| error.to_string())?;
        Ok(Memcached {
            child,
            stream,
            answers: BufReader::with_capacity(1 << 20, same),
            buffer: Vec::new(),
            socket,
        })
    }

    /// Returns the ids of memcached's threads.
    pub fn threads(&self) -> Vec<Pid> {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.child.id()));
        let number = |thread: std::fs::DirEntry| thread.file_name().to_str()?.parse().ok();
        let all = tasks.into_iter().flatten().flatten().filter_map(number);
        all.filter_map(Pid::from_raw).collect()
    }

    /// Sends requests to store pages. The key of each page is its index as a decimal number. Does
    /// not wait for the answers.
    ///
    /// # Errors
    /// The connection to memcached is lost.
    pub fn send_sets<'a>(
        &mut self,
        pages: impl Iterator<Item = (usize, &'a Page)>,
    ) -> Result<(), String> {
        self.buffer.clear();
        for (index, page) in pages {
            self.buffer
                .extend(format!("set {index} 0 0 {PAGE_SIZE}\r\n").as_bytes());
            self.buffer.extend(page);
            self.buffer.extend(b"\r\n");
        }
        self.stream
            .write_all(&self.buffer)
            .map_err(|error| error.to_string())
    }

    /// Reads memcached's answers to requests that store `pages` pages.
    ///
    /// # Errors
    /// memcached did not store a page.
    pub fn take_sets(&mut self, pages: usize) -> Result<(), String> {
        for _ in 0..pages {
            self.line("STORED")?;
        }
        Ok(())
    }

    /// Sends a request for the pages with these indices. Does not wait for the answer.
    ///
    /// # Errors
    /// The connection to memcached is lost.
    pub fn send_gets(&mut self, indices: impl Iterator<Item = usize>) -> Result<(), String> {
        self.buffer.clear();
        self.buffer.extend(b"get");
        for index in indices {
            self.buffer.extend(format!(" {index}").as_bytes());
        }
        self.buffer.extend(b"\r\n");
        self.stream
            .write_all(&self.buffer)
            .map_err(|error| error.to_string())
    }

    /// Reads requested pages from memcached until `into` is full.
    ///
    /// # Errors
    /// A requested page is missing in the answer.
    pub fn take_gets(&mut self, into: &mut [Page]) -> Result<(), String> {
        let fault = |error: std::io::Error| error.to_string();
        for page in into {
            self.line("VALUE")?;
            self.answers.read_exact(page).map_err(fault)?;
            self.answers.read_exact(&mut [0; 2]).map_err(fault)?;
        }
        self.line("END")
    }

    fn line(&mut self, wanted: &str) -> Result<(), String> {
        let mut line = Vec::new();
        let read = self.answers.read_until(b'\n', &mut line);
        read.map_err(|error| error.to_string())?;
        match line.starts_with(wanted.as_bytes()) {
            true => Ok(()),
            false => Err(format!(
                "memcached gave the unexpected answer {:?}",
                String::from_utf8_lossy(&line)
            )),
        }
    }
}

impl Drop for Memcached {
    fn drop(&mut self) {
        // Ignore errors, because memcached may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_file(&self.socket);
    }
}
