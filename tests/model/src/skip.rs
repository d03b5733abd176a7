// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Skipped tests. A test that cannot run on a machine prints the reason. The test fails instead if
//! the environment says that the machine has what the test needs.
//!
//! The printed line is visible although cargo hides the output of tests that pass.
//! `scripts/no-skips` finds out which requirements a machine meets, without running the tests.
//! `make check` passes the result to the tests.

use std::fmt::Display;
use std::io::Write;

/// Environment variable with the names of requirements ([`Missing`]) that the machine meets,
/// separated by commas. A test must not be skipped for lack of a requirement in this list.
pub const NO_SKIPS: &str = "TMEM_NO_SKIPS";

/// Requirement of a test that a machine may lack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// The test needs the user root, which can change to other users.
    Root,
    /// The test needs a kernel that allows io_uring, as workers use it.
    IoUring,
    /// The test needs free huge pages.
    HugePages,
    /// The test needs a kernel whose Landlock has rules for sockets.
    LandlockSockets,
    /// The test needs a second processor, so that two threads can run at the same time.
    Processors,
    /// The test needs a kernel that lets it handle page faults (userfaultfd).
    Userfaultfd,
    /// The test needs a machine with low load, so that it can measure times.
    Quiet,
}

impl Missing {
    /// Returns the name of the requirement in the variable [`NO_SKIPS`].
    pub fn name(self) -> &'static str {
        match self {
            Missing::Root => "root",
            Missing::IoUring => "io_uring",
            Missing::HugePages => "huge_pages",
            Missing::LandlockSockets => "landlock_sockets",
            Missing::Processors => "processors",
            Missing::Userfaultfd => "userfaultfd",
            Missing::Quiet => "quiet",
        }
    }
}

/// Prints that the calling test is skipped, with the missing requirement and the reason.
///
/// # Panics
/// When [`NO_SKIPS`] names the requirement, so that the test must run.
pub fn skipped(missing: Missing, why: impl Display) {
    let there = std::env::var(NO_SKIPS).unwrap_or_default();
    let line = judge(missing, &why, &there);
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a test");
    match line {
        // Do not use a macro such as eprintln!, because the test harness captures its output.
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
            "the test was skipped, although {NO_SKIPS} says that the machine has {name}: {why}"
        )),
        false => Ok(format!("SKIPPED: needs {name}: {why}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skipping_a_test_fails_if_the_machine_has_the_required_feature() {
        for there in ["root", "io_uring, root", "root,quiet"] {
            let error = judge(Missing::Root, &"running as user 7", there).expect_err(there);
            assert!(
                error.contains("running as user 7"),
                "the error does not contain the reason: {error}"
            );
        }
        for there in ["", "io_uring", "rooted"] {
            let line = judge(Missing::Root, &"running as user 7", there)
                .expect("the test failed instead of being skipped");
            assert_eq!(line, "SKIPPED: needs root: running as user 7");
        }
    }
}
