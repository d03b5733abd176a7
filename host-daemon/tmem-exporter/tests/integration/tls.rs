// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of the exporter's TLS: with and without certificates of clients, and with unusable files.

use crate::common::{Certificate, Exporter, ServedDaemon, TIMEOUT, http};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Requests the metrics over TLS. The client trusts only a server with the certificate `server`,
/// and sends the certificate `client` if there is one.
fn https(
    address: &str,
    server: &Certificate,
    client: Option<&Certificate>,
) -> std::io::Result<String> {
    let mut roots = RootCertStore::empty();
    let root = CertificateDer::from_pem_file(server.certificate())
        .expect("cannot read the server's certificate");
    roots
        .add(root)
        .expect("the certificate was refused as a root");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("the provider does not support the default TLS versions")
        .with_root_certificates(roots);
    let config = match client {
        None => builder.with_no_client_auth(),
        Some(client) => {
            let own = CertificateDer::from_pem_file(client.certificate())
                .expect("cannot read the client's certificate");
            let key =
                PrivateKeyDer::from_pem_file(client.key()).expect("cannot read the client's key");
            let config = builder.with_client_auth_cert(vec![own], key);
            config.expect("the certificate and the key do not belong together")
        }
    };
    let name = ServerName::try_from("127.0.0.1").expect("the address is no valid server name");
    let connection =
        ClientConnection::new(Arc::new(config), name).expect("cannot create the TLS client");
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
    let config = config.to_str().expect("the path is not UTF-8");
    Exporter::start(host, &[&["--web.config.file", config], options].concat())
}

#[test]
fn metrics_are_served_over_tls_only() {
    let host = ServedDaemon::new();
    let tls = Certificate::new(host.path("tls"));
    let exporter = start(&host, &tls, "", &[]);
    let answer =
        https(exporter.address(), &tls, None).expect("the exporter did not answer over TLS");
    assert!(answer.starts_with("HTTP/1.1 200 OK") && answer.contains("tmem_up 1.0"));
    let (head, body) = http(exporter.address(), "GET /metrics HTTP/1.1\r\n\r\n");
    assert!(
        !head.contains("HTTP") && !body.contains("tmem_"),
        "a client without TLS got an answer: {head}"
    );
    let other = Certificate::new(host.path("other"));
    https(exporter.address(), &other, None)
        .expect_err("the client accepted a certificate that it does not trust");

    // The exporter uses a renewed certificate for the next connection.
    tls.renew();
    https(exporter.address(), &tls, None).expect("the exporter does not use the new certificate");
    // If the exporter cannot read its certificate or key file, it continues to run and serves no
    // metrics, neither with TLS nor without.
    std::fs::remove_file(tls.key()).expect("cannot remove the file");
    https(exporter.address(), &tls, None)
        .expect_err("the exporter serves although its key is missing");
    let (head, _) = http(exporter.address(), "GET /metrics HTTP/1.1\r\n\r\n");
    assert!(
        head.is_empty(),
        "a client without TLS got an answer while the key is missing: {head}"
    );
    std::fs::write(host.path("tls/web.yml"), "").expect("cannot write the file");
    tls.renew();
    let (head, _) = http(exporter.address(), "GET /metrics HTTP/1.1\r\n\r\n");
    assert!(
        !head.contains("HTTP"),
        "a client without TLS got an answer: {head}"
    );
    https(exporter.address(), &tls, None).expect("the exporter did not keep its TLS configuration");
}

#[test]
fn clients_without_a_required_certificate_are_refused() {
    let host = ServedDaemon::new();
    let tls = Certificate::new(host.path("tls"));
    let client = Certificate::new(host.path("client"));
    let ca = format!(
        "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: {}\n",
        client.certificate().display()
    );
    // The exporter may listen on all addresses without a token, because clients need a certificate.
    let exporter = start(&host, &tls, &ca, &["--web.listen-address", ":0"]);
    let (_, port) = exporter
        .address()
        .rsplit_once(':')
        .expect("the address has no port");
    let address = format!("127.0.0.1:{port}");
    let answer = https(&address, &tls, Some(&client))
        .expect("the exporter did not answer a client with a certificate");
    assert!(
        answer.contains("tmem_up 1.0"),
        "the metrics do not report that the daemon is up: {answer}"
    );
    https(&address, &tls, None).expect_err("the exporter served a client without a certificate");
    https(&address, &tls, Some(&tls))
        .expect_err("the exporter served a client with a certificate of another issuer");
}

/// Clients that never finish the TLS handshake use up the exporter's maximum number of connections.
/// The exporter closes these connections at its time limit.
#[test]
fn slow_tls_handshakes_time_out() {
    let host = ServedDaemon::new();
    let tls = Certificate::new(host.path("tls"));
    let exporter = start(&host, &tls, "", &[]);
    let mut slow: Vec<TcpStream> = (0..8)
        .map(|_| {
            let mut stream =
                TcpStream::connect(exporter.address()).expect("cannot connect to the TCP port");
            // These bytes are the head of a TLS record of 512 bytes, whose content does not follow.
            stream
                .write_all(b"\x16\x03\x01\x02\x00")
                .expect("cannot send the bytes");
            stream
        })
        .collect();
    https(exporter.address(), &tls, None)
        .expect("the exporter does not serve a client beside slow handshakes");
    // Each slow client sends a byte twice a second, so that the exporter never waits long for the
    // next byte. Only a limit on the whole handshake ends such connections.
    let begun = Instant::now();
    let is_open = |stream: &mut TcpStream| {
        let _ = stream.write_all(b"\x01");
        match stream.read(&mut [0; 64]) {
            Ok(bytes) => bytes > 0,
            Err(error) => error.kind() == ErrorKind::WouldBlock,
        }
    };
    for stream in &slow {
        stream
            .set_nonblocking(true)
            .expect("cannot make the socket nonblocking");
    }
    while slow.iter_mut().map(is_open).filter(|open| *open).count() > 0 {
        assert!(
            begun.elapsed() < TIMEOUT,
            "the exporter does not end slow handshakes"
        );
        std::thread::sleep(Duration::from_millis(500));
    }
}

#[test]
fn the_exporter_names_unusable_tls_files_when_it_starts() {
    let host = ServedDaemon::new();
    let tls = Certificate::new(host.path("tls"));
    let run = |more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tmem-exporter"));
        let output = command.args(more).output().expect("cannot run the program");
        assert!(!output.status.success());
        String::from_utf8(output.stderr).expect("the output is not UTF-8")
    };
    let with = |more: &str| {
        let config = tls.web_config(more);
        run(&[
            "--web.config.file",
            config.to_str().expect("the path is not UTF-8"),
        ])
    };
    let error = with("  colour: red\n");
    assert!(
        error.contains("web.yml") && error.contains("tls_server_config.colour"),
        "the error does not name the file and the key: {error}"
    );
    let error = run(&["--web.config.file", "/no/such"]);
    assert!(
        error.contains("/no/such"),
        "the error does not name the missing file: {error}"
    );
    // A TLS configuration without client certificates does not replace the token.
    let config = tls.web_config("");
    let config = config.to_str().expect("the path is not UTF-8");
    let error = run(&[
        "--web.listen-address",
        "0.0.0.0:0",
        "--web.config.file",
        config,
    ]);
    assert!(
        error.contains("--token-file"),
        "the error does not name --token-file: {error}"
    );
    let other = Certificate::new(host.path("other"));
    std::fs::copy(other.key(), tls.key()).expect("cannot copy the file");
    let error = with("");
    assert!(
        error.contains("key.pem"),
        "the error does not name the key's file: {error}"
    );
    std::fs::write(tls.certificate(), "nothing").expect("cannot write the file");
    let error = with("");
    assert!(
        error.contains("certificate.pem"),
        "the error does not name the certificate's file: {error}"
    );
}
