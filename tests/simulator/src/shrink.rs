// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Shrinks a script: fewer steps for the same failure, by delta debugging (Zeller and Hildebrandt,
//! 2002).
//!
//! The algorithm leaves out sequences of steps, long sequences first, as long as the run still
//! breaks the same rule. The remaining steps can be replayed, because the meaning of a step does
//! not depend on its position.

use crate::oracle::Failure;
use crate::run::run;
use crate::script::{Script, Step};

/// Maximum number of runs for shrinking a script, so that the shrinking ends within a minute.
const RUNS_MAX: usize = 4_000;

/// Returns the shortest script found that breaks the same rule as `script`, and its failure.
/// Returns None if `script` does not fail.
#[must_use]
pub fn shrink(script: &Script) -> Option<(Script, Failure)> {
    let (_, first) = run(script).failure?;
    let rule = first.rule;
    let mut best = (script.clone(), first);
    let mut runs = 0;
    let mut length = best.0.steps.len().div_ceil(2).max(1);
    loop {
        let mut at = 0;
        let mut shorter = false;
        while at < best.0.steps.len() && runs < RUNS_MAX {
            let end = (at + length).min(best.0.steps.len());
            let kept: Vec<Step> = [&best.0.steps[..at], &best.0.steps[end..]].concat();
            let tried = Script {
                setup: best.0.setup.clone(),
                steps: kept,
            };
            runs += 1;
            match run(&tried).failure {
                Some((_, failure)) if failure.rule == rule => {
                    best = (tried, failure);
                    shorter = true;
                }
                _ => at = end,
            }
        }
        if runs >= RUNS_MAX || (length == 1 && !shorter) {
            return Some(best);
        }
        length = if length == 1 { 1 } else { length / 2 };
    }
}
