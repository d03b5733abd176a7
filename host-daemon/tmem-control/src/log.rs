// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sets up the log of each long-running program, such as tmemd. If stderr is systemd's journal,
//! messages go to the journal with their fields. Otherwise, they are lines on stderr. Out of scope:
//! which messages the programs log.

use std::io::{IsTerminal, stderr};
use tracing::level_filters::LevelFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::reload::{Handle, Layer};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Registry, fmt};

/// Prefix of the names of a message's fields in systemd's journal, as in `TMEM_VM=web1`.
const FIELD_PREFIX: &str = "TMEM";

/// Handle to the log of this program. With it, the program can change the log filter.
pub struct Log {
    handle: Handle<EnvFilter, Registry>,
    /// True if an environment variable sets the filter. The program then cannot change the filter.
    fixed: bool,
}

fn parse(filter: &str) -> Result<EnvFilter, String> {
    let what = |error| {
        format!("{filter:?} is not a log filter ({error}): write a level, such as info or debug")
    };
    // A single word that is not a level is refused. EnvFilter would take it as the name of a
    // module, and log all messages of that module.
    if let [word] = filter.split([',', '=']).collect::<Vec<_>>()[..]
        && word.parse::<LevelFilter>().is_err()
    {
        return Err(what(
            "the levels are error, warn, info, debug and trace".to_string(),
        ));
    }
    EnvFilter::builder()
        .with_default_directive(LevelFilter::INFO.into())
        .parse(filter)
        .map_err(|error| what(error.to_string()))
}

/// Checks that `filter` is a valid log filter.
///
/// # Errors
/// Returns the reason why the filter is not valid.
pub fn check(filter: &str) -> Result<(), String> {
    parse(filter).map(|_| ())
}

/// Returns true if `journal`, the value of the variable JOURNAL_STREAM, names the device and the
/// inode of stderr as "device:inode". systemd sets this variable for a program whose output goes to
/// the journal.
fn is_journal(journal: Option<&str>, stderr: (u64, u64)) -> bool {
    let numbers = journal.and_then(|text| text.split_once(':'));
    let numbers = numbers.and_then(|(dev, ino)| Some((dev.parse().ok()?, ino.parse().ok()?)));
    numbers == Some(stderr)
}

/// Starts logging at INFO and above, unless the environment variable `variable` sets another filter
/// (`debug`, `tmemd=trace`). A program calls this function once, at its start.
pub fn start(variable: &str) -> Log {
    let filter = EnvFilter::builder()
        .with_env_var(variable)
        .with_default_directive(LevelFilter::INFO.into());
    let (filter, handle) = Layer::new(filter.from_env_lossy());
    let journal = std::env::var("JOURNAL_STREAM").ok();
    let stat = rustix::fs::fstat(stderr()).map_or((0, 0), |stat| (stat.st_dev, stat.st_ino));
    // If the journal cannot be opened, messages are written to stderr as lines.
    let journal = is_journal(journal.as_deref(), stat)
        .then(|| tracing_journald::layer().ok())
        .flatten()
        .map(|layer| layer.with_field_prefix(Some(FIELD_PREFIX.into())));
    let lines = journal.is_none().then(|| {
        fmt::layer()
            .with_writer(stderr)
            .with_ansi(stderr().is_terminal())
            .with_target(false)
    });
    tracing_subscriber::registry()
        .with(filter)
        .with(journal)
        .with(lines)
        .init();
    Log {
        handle,
        fixed: std::env::var_os(variable).is_some(),
    }
}

impl Log {
    /// Replaces the log filter, unless an environment variable has set it.
    ///
    /// # Errors
    /// Returns the reason why the filter is not valid.
    pub fn set(&self, filter: &str) -> Result<(), String> {
        let filter = parse(filter)?;
        if self.fixed {
            return Ok(());
        }
        self.handle
            .reload(filter)
            .map_err(|error| error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn journal_stream_must_name_the_device_and_inode_of_stderr() {
        assert!(is_journal(Some("8:1234"), (8, 1234)));
        for journal in [
            None,
            Some(""),
            Some("8:1235"),
            Some("9:1234"),
            Some("8"),
            Some("a:b"),
        ] {
            assert!(
                !is_journal(journal, (8, 1234)),
                "JOURNAL_STREAM={journal:?} was accepted although it does not name stderr"
            );
        }
    }

    #[test]
    fn log_filters_with_unknown_levels_are_refused() {
        for good in [
            "info",
            "debug",
            "warn,tmemd=trace",
            "tmemd::host::pressure=debug",
        ] {
            assert_eq!(
                check(good),
                Ok(()),
                "the valid log filter {good:?} is refused"
            );
        }
        for bad in ["loud", "tmemd=loud"] {
            assert!(
                check(bad).is_err(),
                "the invalid log filter {bad:?} is accepted"
            );
        }
    }
}
