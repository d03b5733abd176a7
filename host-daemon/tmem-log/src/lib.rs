// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How the programs that stay running write their logs: all alike, to stderr, where systemd's journal
//! takes them. Never here: what is logged.

use std::io::{IsTerminal, stderr};
use tracing::level_filters::LevelFilter;
use tracing_subscriber::EnvFilter;

/// Logs from now on, at INFO and above unless that environment variable says otherwise
/// (`debug`, `tmemd=trace`). Call it once, at the program's start.
pub fn start(variable: &str) {
    let filter = EnvFilter::builder()
        .with_env_var(variable)
        .with_default_directive(LevelFilter::INFO.into());
    tracing_subscriber::fmt()
        .with_writer(stderr)
        .with_ansi(stderr().is_terminal())
        .with_target(false)
        .with_env_filter(filter.from_env_lossy())
        .init();
}
