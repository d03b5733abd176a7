// SPDX-License-Identifier: Apache-2.0 OR MIT
//! tmem-exporter: serves the daemon's figures (statistics) as metrics for Prometheus.
//!
//! The exporter is a process of its own. The daemon, which maps the memory of all guests, therefore
//! opens no port. The exporter uses only the daemon's read-only socket; docs/metrics.md says how to
//! run it.

mod classic;
mod clients;
mod daemon;
mod http;
mod metrics;
mod web_config;

use clap::Parser;
use http::{Access, Format};
use std::net::TcpListener;
use std::process::ExitCode;
use std::sync::Mutex;
use std::time::{Duration, Instant};
use tmem_exporter::Arguments;
use web_config::Tls;

/// Shortest time between two log messages of the exporter about a daemon that does not answer.
const LOG_PERIOD: Duration = Duration::from_secs(60);
/// Minimum number of bytes of a token. An attacker could guess a shorter one.
const TOKEN_BYTES_MIN: usize = 16;

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    tmem_control::log::start("TMEM_EXPORTER_LOG");
    match run(arguments) {
        Ok(never) => match never {},
        Err(error) => {
            tracing::error!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Reads the token file and the TLS settings that the command line names.
fn access(arguments: &Arguments) -> Result<Access, String> {
    let tls = arguments.web_config.as_deref().map(Tls::read);
    let tls = tls.transpose()?.flatten();
    let token = token(arguments)?;
    let verifies = tls.as_ref().is_some_and(Tls::verifies_clients);
    if token.is_none() && !verifies && !arguments.listen.ip().is_loopback() {
        return Err(format!(
            "--web.listen-address {}: other hosts can reach it. Name a token with --token-file, or \
             require client certificates in --web.config.file",
            arguments.listen
        ));
    }
    Ok(Access {
        token,
        tls,
        logged: Mutex::new(None),
    })
}

fn token(arguments: &Arguments) -> Result<Option<String>, String> {
    let Some(path) = &arguments.token_file else {
        return Ok(None);
    };
    let at = path.display();
    let text = std::fs::read_to_string(path).map_err(|e| format!("token file {at}: {e}"))?;
    let token = text.trim();
    if token.len() < TOKEN_BYTES_MIN || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(format!(
            "token file {at}: the token must be one word of {TOKEN_BYTES_MIN} or more letters, \
             digits or punctuation marks. Create one with openssl rand -hex 32"
        ));
    }
    Ok(Some(token.into()))
}

fn run(arguments: Arguments) -> Result<std::convert::Infallible, String> {
    let access = access(&arguments)?;
    let scheme = if access.tls.is_some() {
        "https"
    } else {
        "http"
    };
    let listener = TcpListener::bind(arguments.listen)
        .map_err(|error| format!("cannot listen on {}: {error}", arguments.listen))?;
    let address = listener.local_addr().map_err(|error| error.to_string())?;
    tracing::info!(
        socket = %arguments.socket.display(),
        "serving metrics at {scheme}://{address}/metrics"
    );
    let logged: Mutex<Option<Instant>> = Mutex::new(None);
    let metrics = move |format| {
        let begun = Instant::now();
        let reply = daemon::stats(&arguments.socket);
        if let Err(error) = &reply {
            let mut logged = logged.lock().unwrap_or_else(|e| e.into_inner());
            if logged.is_none_or(|at| at.elapsed() >= LOG_PERIOD) {
                *logged = Some(Instant::now());
                let at = arguments.socket.display();
                tracing::warn!(
                    "the daemon at {at} does not answer: {error}; the metric tmem_up is 0 until it answers"
                );
            }
        }
        let limits = metrics::Limits {
            vms_max: arguments.vms_max,
            vm_totals_only: arguments.vm_totals_only,
        };
        let scrape = metrics::Scrape::new(reply.as_ref().ok(), begun.elapsed(), limits);
        // The error is ignored, because formatting into a string cannot fail.
        let text = scrape.text().unwrap_or_default();
        match format {
            Format::OpenMetrics => text,
            Format::Classic => classic::classic(&text),
        }
    };
    http::serve(&listener, access, metrics)
}
