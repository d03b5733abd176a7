// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Decides on the property `retain` of a domain's device, which allows retained pages: pages that
//! the guest has in its page cache and that stay in the pool.
//!
//! With `retain=on`, QEMU refuses a daemon that does not support retained pages, and the VM then
//! has no cache. A QEMU without the property does not start a VM whose XML has it.

use crate::exit::{Code, Failure};
use clap::ValueEnum;
use tmem_libvirt::domain::DEVICE;

/// Value of the option `--retain`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Retain {
    /// QEMU refuses a daemon that does not know retained pages
    On,
    /// The VM uses no retained pages
    Off,
    /// On if the domain's QEMU and the running daemon know retained pages
    Auto,
}

impl Retain {
    /// Returns the value of the option `--retain`. Without the option, returns the current setting
    /// of the domain's device. A device that has no setting gets `auto`, like a new device.
    pub fn or_setting(option: Option<Retain>, setting: Option<bool>) -> Retain {
        option.unwrap_or(match setting {
            Some(true) => Retain::On,
            Some(false) => Retain::Off,
            None => Retain::Auto,
        })
    }
}

/// Facts about the domain's host on which the value of `retain` depends.
pub struct Facts {
    /// Whether the device of the domain's emulator has the property `retain`; None if the emulator
    /// cannot be asked.
    pub emulator: Option<bool>,
    /// Whether the running daemon supports retained pages; if the daemon cannot be asked, the
    /// reason.
    pub daemon: Result<bool, String>,
}

/// Returns the new value of the property `retain` (None: the XML gets no property), and a note for
/// the user, which is empty or one line. `setting` is the present value of the domain's device.
///
/// # Errors
/// Fails with a message for the user if the VM would not start with the new value.
pub fn decide(
    domain: &str,
    retain: Retain,
    setting: Option<bool>,
    facts: &Facts,
) -> Result<(Option<bool>, String), Failure> {
    match retain {
        Retain::Off => {
            let off = match facts.emulator {
                Some(has_retain) => has_retain.then_some(false),
                None => setting.filter(|on| !on),
            };
            Ok((off, String::new()))
        }
        Retain::On => {
            if facts.emulator == Some(false) {
                return Err(Failure(
                    format!(
                        "domain {domain}: the device {DEVICE} of its emulator has no property \
                         retain. Select a QEMU that has it with --emulator, or add --retain auto"
                    ),
                    Code::Refused,
                ));
            }
            let note = match facts.daemon {
                Ok(false) => format!(
                    "domain {domain}: the running daemon does not know retained pages, so QEMU \
                     refuses it, and the VM has no cache. Update tmemd, or run tmemctl attach \
                     {domain} --retain off\n"
                ),
                _ => String::new(),
            };
            Ok((Some(true), note))
        }
        Retain::Auto => {
            let missing = match (facts.emulator, &facts.daemon) {
                (Some(true), Ok(true)) => return Ok((Some(true), String::new())),
                (None, _) => "the domain's emulator cannot be asked for the property retain",
                (Some(false), _) => "the domain's emulator does not have the property retain",
                (_, Ok(false)) => "the running daemon does not know retained pages",
                (_, Err(why)) => why,
            };
            let note = format!(
                "domain {domain}: retained pages stay off: {missing}. To use them, run tmemctl \
                 attach {domain} --retain auto when QEMU and the daemon know them\n"
            );
            Ok((None, note))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNKNOWN: Result<bool, &str> = Err("no daemon runs");

    fn decided(
        retain: Retain,
        setting: Option<bool>,
        emulator: Option<bool>,
        daemon: Result<bool, &str>,
    ) -> (Option<bool>, String) {
        let daemon = daemon.map_err(Into::into);
        let facts = Facts { emulator, daemon };
        decide("web", retain, setting, &facts).expect("the setting was refused")
    }

    #[test]
    fn retain_auto_is_on_only_if_emulator_and_daemon_support_it() {
        for setting in [None, Some(true), Some(false)] {
            let both = decided(Retain::Auto, setting, Some(true), Ok(true));
            assert_eq!(both, (Some(true), String::new()));
            for (emulator, daemon, why) in [
                (Some(true), Ok(false), "the running daemon does not know"),
                (Some(true), UNKNOWN, "no daemon runs"),
                (Some(false), Ok(true), "does not have the property"),
                (None, Ok(true), "cannot be asked"),
            ] {
                let (value, note) = decided(Retain::Auto, setting, emulator, daemon);
                assert_eq!(
                    value, None,
                    "--retain auto set the property with emulator {emulator:?} and daemon {daemon:?}"
                );
                assert!(
                    note.contains("domain web") && note.contains(why),
                    "the note does not name the domain and the reason: {note}"
                );
            }
        }
    }

    #[test]
    fn retain_on_needs_the_qemu_property_and_notes_a_daemon_without_retained_pages() {
        for emulator in [None, Some(true)] {
            for daemon in [Ok(true), UNKNOWN] {
                let on = decided(Retain::On, None, emulator, daemon);
                assert_eq!(on, (Some(true), String::new()));
            }
            let (on, note) = decided(Retain::On, None, emulator, Ok(false));
            assert_eq!(on, Some(true));
            assert!(note.contains("no cache") && note.contains("tmemctl attach web --retain off"));
        }
        let facts = Facts {
            emulator: Some(false),
            daemon: Ok(true),
        };
        let Err(Failure(why, Code::Refused)) = decide("web", Retain::On, None, &facts) else {
            panic!("an emulator without the property was accepted");
        };
        assert!(why.contains("domain web") && why.contains("--emulator"));
    }

    #[test]
    fn retain_off_is_written_only_for_an_emulator_with_the_property() {
        for daemon in [Ok(true), Ok(false), UNKNOWN] {
            for (emulator, setting, value) in [
                (Some(true), None, Some(false)),
                (Some(true), Some(true), Some(false)),
                (Some(false), Some(false), None),
                (None, None, None),
                (None, Some(true), None),
                (None, Some(false), Some(false)),
            ] {
                let off = decided(Retain::Off, setting, emulator, daemon);
                assert_eq!(
                    off,
                    (value, String::new()),
                    "--retain off gave the wrong value with emulator {emulator:?} and setting {setting:?}"
                );
            }
        }
    }

    #[test]
    fn the_retain_setting_stays_if_the_option_is_not_given() {
        let cases = [
            (None, Some(true), Retain::On),
            (None, Some(false), Retain::Off),
            (None, None, Retain::Auto),
            (Some(Retain::Off), Some(true), Retain::Off),
            (Some(Retain::Auto), Some(false), Retain::Auto),
        ];
        for (option, setting, expected) in cases {
            assert_eq!(Retain::or_setting(option, setting), expected);
        }
    }
}
