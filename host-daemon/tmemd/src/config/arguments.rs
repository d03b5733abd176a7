// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Command line of tmemd. The program, its man page and its shell completions use this definition.
//! Options that are also keys of the configuration file are in [`Settings`].

use crate::config::file::{self, Settings};
use crate::config::settings::TRACE_BYTES_DEFAULT;
use clap::Parser;
use std::path::PathBuf;
use tmem_control::size;

/// Host daemon of virtio-tmem: keeps pages that guests evict in a pool that all VMs share.
#[derive(Parser)]
#[command(version)]
pub struct Arguments {
    /// Configuration file. Options take precedence over it. tmemd.toml(5) describes it
    #[arg(long, value_name = "PATH", default_value = file::DEFAULT_PATH)]
    pub config: PathBuf,
    /// Check file and options, and exit
    #[arg(long)]
    pub check_config: bool,
    // The field `settings` has no doc comment, because clap would print the comment as the help of
    // the complete command.
    #[allow(missing_docs)]
    #[command(flatten)]
    pub settings: Settings,
    /// Record the requests of guests, without contents and names, to a new file
    #[arg(long, value_name = "PATH")]
    pub trace: Option<PathBuf>,
    /// Size of the trace's file at which the recording ends
    #[arg(long, value_name = "SIZE", value_parser = size::parse, requires = "trace",
          default_value = TRACE_BYTES_DEFAULT)]
    pub trace_max: u64,
    /// Do not confine the process to the system calls and files that it needs, for debuggers and
    /// profilers
    #[arg(long)]
    pub no_sandbox: bool,
}
