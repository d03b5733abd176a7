// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Skipped tests: a test that a machine cannot run prints the reason, and fails where the machine
//! is known to have what the test needs.
//!
//! cargo hides the output of tests that pass; this line is not hidden. `scripts/no-skips` finds
//! out, without these tests, what a machine has, and `make check` passes the result on.

use std::fmt::Display;
use std::io::Write;

/// Environment variable with names of [`Missing`], separated by commas: the machine has these, so
/// that no test may be skipped for them.
pub const NO_SKIPS: &str = "TMEM_NO_SKIPS";

/// Requirement of a test that a machine may lack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// Root, which can change to other users.
    Root,
    /// io_uring, as workers use it.
    IoUring,
    /// Huge pages that are free.
    HugePages,
    /// Landlock with rules for sockets.
    LandlockSockets,
    /// One more processor.
    Processors,
    /// Low load, so that times can be measured.
    Quiet,
}

impl Missing {
    /// Returns the name in [`NO_SKIPS`].
    pub fn name(self) -> &'static str {
        match self {
            Missing::Root => "root",
            Missing::IoUring => "io_uring",
            Missing::HugePages => "huge_pages",
            Missing::LandlockSockets => "landlock_sockets",
            Missing::Processors => "processors",
            Missing::Quiet => "quiet",
        }
    }
}

/// Prints that the calling test ends here, and why.
///
/// # Panics
/// When [`NO_SKIPS`] names the requirement, or a name that is unknown.
pub fn skipped(missing: Missing, why: impl Display) {
    let there = std::env::var(NO_SKIPS).unwrap_or_default();
    let line = judge(missing, &why, &there);
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a test");
    match line {
        // Not with a macro, because the test harness captures the output of macros.
        Ok(line) => {
            let _ = writeln!(std::io::stderr(), "{test}: {line}");
        }
        Err(line) => panic!("{test}: {line}"),
    }
}

fn judge(missing: Missing, why: &dyn Display, there: &str) -> Result<String, String> {
    let name = missing.name();
    match there.split(',').any(|known| known.trim() == name) {
        true => Err(format!(
            "skipped, but {NO_SKIPS} says that {name} is there: {why}"
        )),
        false => Ok(format!("SKIPPED for want of {name}: {why}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skipping_fails_if_the_machine_meets_the_requirement() {
        for there in ["root", "io_uring, root", "root,quiet"] {
            let error = judge(Missing::Root, &"user 7", there).expect_err(there);
            assert!(error.contains("user 7"), "{error}");
        }
        for there in ["", "io_uring", "rooted"] {
            let line = judge(Missing::Root, &"user 7", there).expect("skipped");
            assert_eq!(line, "SKIPPED for want of root: user 7");
        }
    }
}
