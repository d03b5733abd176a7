// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A minimal HTTP server for scrapes, with or without TLS. Each connection carries one request, and
//! the server closes it after the answer.
//!
//! A guest may be able to reach the port, so the server bounds the size, time and number of
//! everything that a client sends. Out of scope: request bodies and files.

use crate::clients::{WaitingClient, WaitingClients};
use crate::web_config::Tls;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use subtle::ConstantTimeEq;

/// Maximum number of clients that get metrics at a time: twice the number that two Prometheus
/// servers and a few people with browsers need. Clients whose request has not arrived yet have a
/// limit of their own, see `clients.rs`.
const CLIENTS_MAX: usize = 8;
/// Maximum number of threads for clients. It is above the number of clients, because the thread of a
/// client that was disconnected ends a little later.
const THREADS_MAX: usize = 128;
/// Maximum number of bytes of a request. A request of Prometheus has a few hundred.
const REQUEST_BYTES_MAX: usize = 8 << 10;
/// Maximum number of header lines of a request.
const HEADERS_MAX: usize = 64;
/// Longest time from the start of a connection until its request has arrived completely. It
/// includes the TLS handshake.
const READ_MAX: Duration = Duration::from_secs(5);
/// Longest time for sending an answer. A client that reads more slowly is disconnected.
const WRITE_MAX: Duration = Duration::from_secs(10);
/// Shortest time between two log messages about certificates that cannot be read.
const LOG_PERIOD: Duration = Duration::from_secs(60);
/// Pause of the server after it could not accept a connection or start a thread.
const PAUSE: Duration = Duration::from_millis(100);

/// Text format of the metrics that a client accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// The client accepts the text format of OpenMetrics 1.0.
    OpenMetrics,
    /// The client accepts only Prometheus' older text format 0.0.4.
    Classic,
}

impl Format {
    fn content_type(self) -> &'static str {
        match self {
            Format::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Format::Classic => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

/// Page that a client requests.
#[derive(Debug, PartialEq, Eq)]
enum Page {
    Metrics(Format),
    /// The request is for the root page: a line of text for people that says where the metrics are.
    Root,
    /// The server refuses the request. The values are the HTTP status of the answer, and the line
    /// of text that is its body.
    Refusal(&'static str, &'static str),
}

/// Returns the page that a complete request names, or a refusal.
fn parse_request(request: &httparse::Request<'_, '_>, token: Option<&str>) -> Page {
    let header = |name: &str| {
        let mut all = request.headers.iter();
        let found = all.find(|header| header.name.eq_ignore_ascii_case(name));
        found.map_or(&b""[..], |header| header.value)
    };
    if let Some(token) = token {
        let wanted = format!("Bearer {token}");
        // The time of this comparison must not reveal the token, so it is constant. It depends only
        // on the length of the token, which is not secret.
        if !bool::from(header("authorization").ct_eq(wanted.as_bytes())) {
            return Page::Refusal("401 Unauthorized", "a bearer token is required\n");
        }
    }
    if request.method != Some("GET") {
        return Page::Refusal("405 Method Not Allowed", "GET only\n");
    }
    let path = request.path.unwrap_or_default();
    match path.split('?').next() {
        Some("/metrics") => {
            let accept = String::from_utf8_lossy(header("accept"));
            Page::Metrics(match accept.contains("application/openmetrics-text") {
                true => Format::OpenMetrics,
                false => Format::Classic,
            })
        }
        Some("/") => Page::Root,
        _ => Page::Refusal("404 Not Found", "not found: metrics are at /metrics\n"),
    }
}

/// A client's connection, whose reads and writes fail after a deadline.
struct Client {
    stream: TcpStream,
    deadline: Instant,
}

impl Client {
    /// Repeats `act` while it would block or is interrupted, and returns its result. Returns the
    /// error `TimedOut` if the deadline passes.
    fn until_deadline<T>(
        &mut self,
        mut act: impl FnMut(&TcpStream, Duration) -> std::io::Result<T>,
    ) -> std::io::Result<T> {
        loop {
            let left = self.deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ErrorKind::TimedOut.into());
            }
            match act(&self.stream, left) {
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                done => return done,
            }
        }
    }
}

impl Read for Client {
    fn read(&mut self, bytes: &mut [u8]) -> std::io::Result<usize> {
        self.until_deadline(|mut stream, left| {
            stream.set_read_timeout(Some(left))?;
            stream.read(bytes)
        })
    }
}

impl Write for Client {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.until_deadline(|mut stream, left| {
            stream.set_write_timeout(Some(left))?;
            stream.write(bytes)
        })
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Reads a client's request and returns what it asks for; None if the connection ends before the
/// request is complete.
fn read_request(stream: &mut dyn Read, token: Option<&str>) -> Option<Page> {
    let (mut bytes, mut part) = (Vec::new(), [0; 1024]);
    loop {
        match stream.read(&mut part) {
            Ok(0) => return None,
            Ok(read) => bytes.extend_from_slice(&part[..read]),
            Err(error) if error.kind() == ErrorKind::TimedOut => {
                return Some(Page::Refusal(
                    "408 Request Timeout",
                    "the request did not arrive in time\n",
                ));
            }
            Err(_) => return None,
        }
        if bytes.len() > REQUEST_BYTES_MAX {
            return Some(Page::Refusal(
                "431 Request Header Fields Too Large",
                "the request is too large\n",
            ));
        }
        let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
        let mut request = httparse::Request::new(&mut headers);
        match request.parse(&bytes) {
            Ok(httparse::Status::Complete(_)) => return Some(parse_request(&request, token)),
            Ok(httparse::Status::Partial) => {}
            Err(_) => {
                return Some(Page::Refusal(
                    "400 Bad Request",
                    "this is not an HTTP request\n",
                ));
            }
        }
    }
}

/// Returns the head and the body of the answer to a request.
fn response(page: Page, metrics: &dyn Fn(Format) -> String) -> (String, String) {
    let (status, content_type, more, body) = match page {
        Page::Metrics(format) => ("200 OK", format.content_type(), "", metrics(format)),
        Page::Root => {
            let body = "tmem-exporter: metrics are at /metrics\n".into();
            ("200 OK", "text/plain; charset=utf-8", "", body)
        }
        Page::Refusal(status, line) => {
            let challenge = match status.starts_with("401") {
                true => "WWW-Authenticate: Bearer\r\n",
                false => "",
            };
            (status, "text/plain; charset=utf-8", challenge, line.into())
        }
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {}\r\n{more}\
         Cache-Control: no-store\r\nConnection: close\r\n\r\n",
        body.len()
    );
    (head, body)
}

/// Requirements that a client must meet, and the exporter's TLS settings.
#[derive(Debug)]
pub struct Access {
    /// The token that clients must send; None if they need none.
    pub token: Option<String>,
    /// TLS settings of the exporter; None if it serves plain HTTP.
    pub tls: Option<Tls>,
    /// Time of the last log message about certificates that cannot be read.
    pub logged: Mutex<Option<Instant>>,
}

/// Holder of one of a limited number of places. Dropping the value frees the place.
struct Place(Arc<AtomicUsize>);

impl Place {
    /// Takes one of `places_max` places; returns None if all are taken.
    fn take(taken: &Arc<AtomicUsize>, places_max: usize) -> Option<Place> {
        if taken.fetch_add(1, SeqCst) >= places_max {
            taken.fetch_sub(1, SeqCst);
            return None;
        }
        Some(Place(taken.clone()))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

/// Takes a place among the clients that get metrics, if the page has metrics. If no place is free,
/// replaces the page by a refusal.
fn take_place(page: &mut Page, served: &Arc<AtomicUsize>) -> Option<Place> {
    if !matches!(page, Page::Metrics(_)) {
        return None;
    }
    let place = Place::take(served, CLIENTS_MAX);
    if place.is_none() {
        let line = "the maximum number of clients is being served\n";
        *page = Page::Refusal("503 Service Unavailable", line);
    }
    place
}

/// Reads the request of one connection and answers it. An I/O error means that the client has
/// disconnected, or reads the answer too slowly.
fn answer(
    stream: TcpStream,
    waiting: WaitingClient,
    served: &Arc<AtomicUsize>,
    access: &Access,
    metrics: &dyn Fn(Format) -> String,
) -> std::io::Result<()> {
    let mut client = Client {
        stream,
        deadline: Instant::now() + READ_MAX,
    };
    let token = access.token.as_deref();
    let Some(tls) = &access.tls else {
        let Some(mut page) = read_request(&mut client, token) else {
            return Ok(());
        };
        drop(waiting);
        let _place = take_place(&mut page, served);
        let (head, body) = response(page, metrics);
        client.deadline = Instant::now() + WRITE_MAX;
        client.write_all(head.as_bytes())?;
        return client.write_all(body.as_bytes());
    };
    let connection = tls.server_config().and_then(|config| {
        rustls::ServerConnection::new(config).map_err(|error| error.to_string())
    });
    let connection = match connection {
        Ok(connection) => connection,
        Err(error) => {
            let mut logged = access.logged.lock().unwrap_or_else(|e| e.into_inner());
            if logged.is_none_or(|at| at.elapsed() >= LOG_PERIOD) {
                *logged = Some(Instant::now());
                tracing::error!("cannot serve clients over TLS: {error}");
            }
            return Ok(());
        }
    };
    let mut stream = rustls::StreamOwned::new(connection, client);
    let Some(mut page) = read_request(&mut stream, token) else {
        return Ok(());
    };
    drop(waiting);
    let _place = take_place(&mut page, served);
    let (head, body) = response(page, metrics);
    stream.sock.deadline = Instant::now() + WRITE_MAX;
    stream.write_all(head.as_bytes())?;
    stream.write_all(body.as_bytes())?;
    stream.conn.send_close_notify();
    stream.flush()
}

/// Accepts connections and answers them. Never returns.
pub fn serve(
    listener: &TcpListener,
    access: Access,
    metrics: impl Fn(Format) -> String + Send + Sync + 'static,
) -> ! {
    let shared = Arc::new((access, metrics));
    let waiting = WaitingClients::default();
    let (threads, served): (Arc<AtomicUsize>, Arc<AtomicUsize>) = Default::default();
    loop {
        let accepted = listener.accept();
        let accepted = accepted.and_then(|(stream, from)| Ok((stream.try_clone()?, stream, from)));
        let (stream, handle, from) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!("cannot accept a connection: {error}");
                std::thread::sleep(PAUSE);
                continue;
            }
        };
        let Some(thread) = Place::take(&threads, THREADS_MAX) else {
            // The threads of many disconnected clients have not ended yet. The new connection is
            // closed without an answer.
            continue;
        };
        let waiting = waiting.add(from.ip(), handle);
        let (shared, served) = (shared.clone(), served.clone());
        let spawned = std::thread::Builder::new()
            .name("scrape".into())
            .spawn(move || {
                let _thread = thread;
                let (access, metrics) = &*shared;
                let answer = || answer(stream, waiting, &served, access, metrics);
                if std::panic::catch_unwind(std::panic::AssertUnwindSafe(answer)).is_err() {
                    tracing::error!(
                        "the thread for a scrape panicked, which is a bug of tmem-exporter"
                    );
                }
            });
        if let Err(error) = spawned {
            tracing::warn!("cannot start a thread for a client: {error}");
            std::thread::sleep(PAUSE);
        }
    }
}
