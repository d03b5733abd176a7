// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests that this machine cannot run say so, and fail where somebody knows that it can.
//!
//! What a test prints is hidden by cargo if it passes; this is not. `scripts/no-skips` finds out, without these
//! tests, what a machine has, and `make check` demands it.

use std::fmt::Display;
use std::io::Write;

/// Names of [`Missing`] with commas between them: what is there, so that no test may be skipped for it.
pub const NO_SKIPS: &str = "TMEM_NO_SKIPS";

/// What a test wants of a machine and may not find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// Being root, who can be others.
    Root,
    /// io_uring, as workers use it.
    IoUring,
    /// Huge pages that are nobody's.
    HugePages,
    /// Landlock that knows sockets.
    LandlockSockets,
    /// A processor more.
    Processors,
    /// Neighbours that leave it time enough to measure.
    Quiet,
}

impl Missing {
    /// As [`NO_SKIPS`] has it.
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

/// Says that the calling test ends here, and why.
///
/// # Panics
/// It is known to be there, or the list names something that nobody looks for.
pub fn skipped(missing: Missing, why: impl Display) {
    let there = std::env::var(NO_SKIPS).unwrap_or_default();
    let line = judge(missing, &why, &there);
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a test");
    match line {
        // Not by a macro, whose output is kept from who looks on.
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
    fn what_is_known_to_be_there_is_not_skipped() {
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
