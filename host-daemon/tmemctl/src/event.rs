// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `event`: prints the daemon's events, in the style of `virsh event`.

use crate::client::{connect, refused};
use crate::exit::{Code, Failure};
use crate::output::print;
use crate::reach::{Reach, within_timeout};
use clap::Args;
use tmem_control as api;
use tmem_control::VarlinkClientInterface;

/// Options of `event`.
#[derive(Args, Clone)]
pub struct EventArguments {
    /// Print events until the daemon ends, instead of only the first one
    #[arg(long = "loop")]
    go_on: bool,
    /// Print the time of each event (UTC)
    #[arg(long)]
    timestamp: bool,
    /// Print only events of this VM
    #[arg(long, value_name = "NAME")]
    vm: Option<String>,
    /// Print only events of this kind; docs/control.md lists the kinds
    #[arg(long, value_name = "KIND")]
    kind: Option<String>,
}

impl EventArguments {
    fn wants(&self, event: &api::Event) -> bool {
        let of_vm = self.vm.is_none() || self.vm == event.vm;
        // The daemon begins each subscription with the event "subscribed". tmemctl prints that
        // event only if `--kind` names it.
        let of_kind = match &self.kind {
            Some(kind) => *kind == event.kind,
            None => event.kind != "subscribed",
        };
        of_vm && of_kind
    }
}

/// Formats `time_ms`, a time since 1970 in ms, as in 2026-11-22T03:10:11.123Z. The date is computed
/// with Howard Hinnant's algorithm `civil_from_days`.
pub fn utc(time_ms: i64) -> String {
    let (days, ms) = (
        time_ms.div_euclid(86_400_000),
        time_ms.rem_euclid(86_400_000),
    );
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 {
        shifted_month + 3
    } else {
        shifted_month - 9
    };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    let (s, ms) = (ms / 1000, ms % 1000);
    format!(
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}.{ms:03}Z",
        s / 3600,
        s / 60 % 60,
        s % 60
    )
}

fn line(event: &api::Event, arguments: &EventArguments) -> String {
    let mut text = String::new();
    if event.lost > 0 {
        text += &format!("({} events were lost)\n", event.lost);
    }
    if arguments.timestamp {
        text += &utc(event.time_ms);
        text += ": ";
    }
    text += &format!("event '{}'", event.kind);
    if let Some(vm) = &event.vm {
        text += &format!(" for VM {vm}");
    }
    text + ": " + &event.text.replace(char::is_control, " ") + "\n"
}

/// Prints the first event that the options select, or with `--loop` each such event until the
/// daemon ends. In the latter case, tmemctl ends with exit code 3.
pub fn run(reach: &Reach, arguments: &EventArguments) -> Result<(), Failure> {
    // The first request has a time limit, and so detects a daemon that hangs. The wait for events
    // has no time limit.
    within_timeout(&reach.daemon(), reach, |reach| {
        let answered = connect(&reach.socket)?.list_vms().call();
        answered.map_err(|error| refused(&reach.socket, &error))
    })?;
    let mut client = connect(&reach.socket)?;
    let mut call = client.subscribe_events();
    let events = call
        .more()
        .map_err(|error| refused(&reach.socket, &error))?;
    let ended = || {
        let at = reach.socket.display();
        Failure(
            format!("the daemon at {at} has ended, so no more events follow"),
            Code::Unreachable,
        )
    };
    for event in events {
        let event = event.map_err(|error| match error.source_varlink_kind() {
            Some(varlink::ErrorKind::Io(_) | varlink::ErrorKind::ConnectionClosed) => ended(),
            _ => refused(&reach.socket, &error),
        })?;
        let event = event.event;
        if !arguments.wants(&event) {
            continue;
        }
        if reach.json {
            let json =
                serde_json::to_string(&event).map_err(|e| Failure(e.to_string(), Code::Failed))?;
            print(&(json + "\n"))?;
        } else {
            print(&line(&event, arguments))?;
        }
        if !arguments.go_on {
            return Ok(());
        }
    }
    Err(ended())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unix_times_are_printed_as_utc_dates() {
        for (time_ms, text) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_399_999, "2000-02-28T23:59:59.999Z"),
            (951_782_400_000, "2000-02-29T00:00:00.000Z"),
            (1_793_329_811_123, "2026-10-30T03:10:11.123Z"),
            (4_107_542_399_000, "2100-02-28T23:59:59.000Z"),
            (4_107_542_400_000, "2100-03-01T00:00:00.000Z"),
        ] {
            assert_eq!(utc(time_ms), text);
        }
    }
}
