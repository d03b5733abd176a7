// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of the exporter's TLS: with and without certificates of clients, and with wrong files.

mod common;

use common::{Certificate, Exporter, ServedDaemon, TIMEOUT, http};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Requests the metrics over TLS, from a server with that certificate, with a client's certificate
/// if there is one.
fn https(
    address: &str,
    server: &Certificate,
    client: Option<&Certificate>,
) -> std::io::Result<String> {
    let mut roots = RootCertStore::empty();
    let root = CertificateDer::from_pem_file(server.certificate()).expect("a certificate");
    roots.add(root).expect("added");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots);
    let config = match client {
        None => builder.with_no_client_auth(),
        Some(client) => {
            let own = CertificateDer::from_pem_file(client.certificate()).expect("a certificate");
            let key = PrivateKeyDer::from_pem_file(client.key()).expect("a key");
            let config = builder.with_client_auth_cert(vec![own], key);
            config.expect("they fit")
        }
    };
    let name = ServerName::try_from("127.0.0.1").expect("a name");
    let connection = ClientConnection::new(Arc::new(config), name).expect("a client");
    let socket = TcpStream::connect(address)?;
    socket.set_read_timeout(Some(TIMEOUT))?;
    let mut stream = StreamOwned::new(connection, socket);
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

fn start(host: &ServedDaemon, tls: &Certificate, more: &str, options: &[&str]) -> Exporter {
    let config = tls.web_config(more);
    let config = config.to_str().expect("text");
    Exporter::start(host, &[&["--web.config.file", config], options].concat())
}

#[test]
fn metrics_are_served_over_tls_only() {
    let host = ServedDaemon::new();
    let tls = Certificate::new(host.path("tls"));
    let exporter = start(&host, &tls, "", &[]);
    let answer = https(exporter.address(), &tls, None).expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 200 OK") && answer.contains("tmem_up 1.0"));
    let (head, body) = http(exporter.address(), "GET /metrics HTTP/1.1\r\n\r\n");
    assert!(!head.contains("HTTP") && !body.contains("tmem_"), "{head}");
    let other = Certificate::new(host.path("other"));
    https(exporter.address(), &other, None).expect_err("another certificate");

    // A renewed certificate applies to the next connection.
    tls.renew();
    https(exporter.address(), &tls, None).expect("the new certificate");
    // Files that cannot be read do not end the exporter, and no metrics are served without TLS.
    std::fs::remove_file(tls.key()).expect("there");
    https(exporter.address(), &tls, None).expect_err("there is no key");
    let (head, _) = http(exporter.address(), "GET /metrics HTTP/1.1\r\n\r\n");
    assert!(head.is_empty(), "{head}");
    std::fs::write(host.path("tls/web.yml"), "").expect("written");
    tls.renew();
    let (head, _) = http(exporter.address(), "GET /metrics HTTP/1.1\r\n\r\n");
    assert!(!head.contains("HTTP"), "{head}");
    https(exporter.address(), &tls, None).expect("it still has TLS");
}

#[test]
fn clients_need_a_certificate_if_it_is_required() {
    let host = ServedDaemon::new();
    let tls = Certificate::new(host.path("tls"));
    let client = Certificate::new(host.path("client"));
    let ca = format!(
        "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: {}\n",
        client.certificate().display()
    );
    // Other hosts may be served without a token, because clients are verified.
    let exporter = start(&host, &tls, &ca, &["--web.listen-address", ":0"]);
    let (_, port) = exporter.address().rsplit_once(':').expect("a port");
    let address = format!("127.0.0.1:{port}");
    let answer = https(&address, &tls, Some(&client)).expect("an answer");
    assert!(answer.contains("tmem_up 1.0"), "{answer}");
    https(&address, &tls, None).expect_err("no certificate");
    https(&address, &tls, Some(&tls)).expect_err("a certificate of another issuer");
}

/// Connections that never finish the handshake occupy all places, and are dropped in time.
#[test]
fn slow_tls_handshakes_time_out() {
    let host = ServedDaemon::new();
    let tls = Certificate::new(host.path("tls"));
    let exporter = start(&host, &tls, "", &[]);
    let mut slow: Vec<TcpStream> = (0..8)
        .map(|_| {
            let mut stream = TcpStream::connect(exporter.address()).expect("connects");
            // The head of a record of 512 bytes.
            stream.write_all(b"\x16\x03\x01\x02\x00").expect("sent");
            stream
        })
        .collect();
    https(exporter.address(), &tls, None).expect_err("no place is free");
    let begun = Instant::now();
    while https(exporter.address(), &tls, None).is_err() {
        assert!(begun.elapsed() < TIMEOUT, "no client is served any more");
        // Each byte comes long before the time of a request has passed.
        for stream in &mut slow {
            let _ = stream.write_all(b"\x01");
        }
        std::thread::sleep(Duration::from_millis(500));
    }
}

#[test]
fn unusable_tls_files_are_named_at_the_start() {
    let host = ServedDaemon::new();
    let tls = Certificate::new(host.path("tls"));
    let run = |more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tmem-exporter"));
        let output = command.args(more).output().expect("runs");
        assert!(!output.status.success());
        String::from_utf8(output.stderr).expect("text")
    };
    let with = |more: &str| {
        let config = tls.web_config(more);
        run(&["--web.config.file", config.to_str().expect("text")])
    };
    let error = with("  colour: red\n");
    assert!(
        error.contains("web.yml") && error.contains("tls_server_config.colour"),
        "{error}"
    );
    let error = run(&["--web.config.file", "/no/such"]);
    assert!(error.contains("/no/such"), "{error}");
    // TLS without a check of clients does not replace the token.
    let config = tls.web_config("");
    let config = config.to_str().expect("text");
    let error = run(&[
        "--web.listen-address",
        "0.0.0.0:0",
        "--web.config.file",
        config,
    ]);
    assert!(error.contains("--token-file"), "{error}");
    let other = Certificate::new(host.path("other"));
    std::fs::copy(other.key(), tls.key()).expect("copied");
    let error = with("");
    assert!(error.contains("key.pem"), "{error}");
    std::fs::write(tls.certificate(), "nothing").expect("written");
    let error = with("");
    assert!(error.contains("certificate.pem"), "{error}");
}
