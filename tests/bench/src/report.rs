// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Report of measured ratios with their targets.

use crate::measure::Ratio;
use std::io::{IsTerminal, Write};

/// Target of a ratio: an upper bound that it should not exceed, or a lower bound that it should
/// reach.
#[derive(Clone, Copy)]
pub enum Target {
    AtMost(f64),
    AtLeast(f64),
    /// The ratio has no target and is only reported.
    None,
}

impl Target {
    fn met(self, value: f64) -> Option<bool> {
        match self {
            Target::AtMost(max) => Some(value <= max),
            Target::AtLeast(min) => Some(value >= min),
            Target::None => None,
        }
    }

    fn text(self) -> String {
        match self {
            Target::AtMost(max) => format!("≤ {max:.2}"),
            Target::AtLeast(min) => format!("≥ {min:.2}"),
            Target::None => String::new(),
        }
    }
}

/// All ratios with their names and targets, in the order in which they are reported.
#[derive(Default)]
pub struct Results(Vec<(&'static str, Target, Result<Ratio, String>)>);

impl Results {
    /// Adds a ratio with the name `key`, or the reason why it was not measured.
    pub fn add(&mut self, key: &'static str, target: Target, ratio: Result<Ratio, String>) {
        self.0.push((key, target, ratio));
    }

    /// Prints the ratios and their targets as a table.
    pub fn print(&self) {
        println!("\n{:34} {:>9}   95 % interval", "ratio", "");
        for (key, target, ratio) in &self.0 {
            match ratio {
                Ok(Ratio { value, low, high }) => {
                    let met = match target.met(*value) {
                        Some(true) => "met",
                        Some(false) => "MISSED",
                        None => "",
                    };
                    let interval = if low < high {
                        format!("{low:.3} – {high:.3}")
                    } else {
                        String::new()
                    };
                    println!(
                        "{key:34} {value:9.3}   {interval:17} {:8} {met}",
                        target.text()
                    );
                }
                Err(reason) => println!("{key:34}         –   not measured: {reason}"),
            }
        }
    }
}

/// Shows the progress of the benchmark on stderr, if stderr is a terminal.
pub fn progress(text: &str) {
    if std::io::stderr().is_terminal() {
        eprint!("\r\x1b[K{text}");
        std::io::stderr().flush().ok();
    }
}
