// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `advise`: what more memory would bring each VM, and what it could give up.
//!
//! The engine follows a sample of each VM's keys (tmem-pool's gain.rs): from that it knows about how many
//! misses more room would have made hits, and how many hits less room would have made misses. Here these
//! become sentences. Never here: a change.

use crate::table::{Align, percent, size, table};
use crate::{Failure, Reach, Said, in_time, stats};
use clap::Args;
use serde::Serialize;
use std::time::Duration;
use tmem_control::VmStats;

/// More and less room that the engine tells of, in percent.
const MORE: [i64; 3] = [25, 50, 100];
const LESS: [i64; 3] = [25, 50, 75];

/// Fewer gets say nothing: one file read twice is as many.
const GETS_MIN: i64 = 1_000;
/// So many, of a few hundred followed keys each got several times, are as good as it gets: the engine's
/// test finds it off by a fifth at most.
const GETS_GOOD: i64 = 50_000;

/// More room is worth its memory if it makes so many more of all gets hits.
const GAIN_WORTH_PERCENT: f64 = 2.0;
/// Room that so few of all hits need can be given up.
const LOSS_BEARABLE_PERCENT: f64 = 1.0;

/// Over what time.
#[derive(Args, Clone)]
pub struct AdviseArguments {
    /// Only of this VM
    vm: Option<String>,
    /// Look at the next so many seconds, instead of all since the daemon's start
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    over: Option<u64>,
}

/// What can be said of a VM.
#[derive(Debug, PartialEq, Serialize)]
pub struct Advice {
    name: String,
    gets: i64,
    hit_percent: Option<f64>,
    /// In percent of all gets, for 25, 50 and 100 % more room.
    gain_percent: Option<[f64; 3]>,
    /// In percent of all gets, for 25, 50 and 75 % less room.
    loss_percent: Option<[f64; 3]>,
    can_give_up_bytes: i64,
    /// none, low or good.
    confidence: &'static str,
    advice: String,
}

/// What was counted, all of it or since an earlier look.
struct Counted {
    gets: i64,
    hits: i64,
    gain: [i64; 3],
    loss: [i64; 3],
    loss_seen: i64,
}

fn three(numbers: &[i64]) -> [i64; 3] {
    std::array::from_fn(|nth| numbers.get(nth).copied().unwrap_or(0))
}

impl Counted {
    fn of(vm: &VmStats) -> Counted {
        Counted {
            gets: vm.gets,
            hits: vm.hits,
            gain: three(&vm.gain_hits),
            loss: three(&vm.loss_hits),
            loss_seen: vm.loss_hits_seen,
        }
    }

    fn since(self, before: &Counted) -> Counted {
        // A daemon that was started anew counts from 0.
        if self.gets < before.gets {
            return self;
        }
        Counted {
            gets: self.gets - before.gets,
            hits: self.hits - before.hits,
            gain: std::array::from_fn(|nth| self.gain[nth] - before.gain[nth]),
            loss: std::array::from_fn(|nth| self.loss[nth] - before.loss[nth]),
            loss_seen: self.loss_seen - before.loss_seen,
        }
    }
}

fn advice(vm: &VmStats, counted: &Counted) -> Advice {
    let Counted { gets, hits, .. } = *counted;
    let of_gets = |count: f64| count * 100.0 / gets as f64;
    // No estimate may exceed what there is.
    let gain = counted
        .gain
        .map(|more| of_gets(more.clamp(0, (gets - hits).max(0)) as f64));
    let lost = |fewer: i64| fewer as f64 / counted.loss_seen.max(1) as f64;
    let loss = counted
        .loss
        .map(|fewer| of_gets(hits as f64 * lost(fewer).clamp(0.0, 1.0)));
    let confidence = match gets {
        ..GETS_MIN => "none",
        GETS_MIN..GETS_GOOD => "low",
        _ => "good",
    };
    let known = gets >= GETS_MIN;
    // Without hits nothing was lost, either: all that it holds is of no use so far.
    let bearable = counted.loss.map(|fewer| {
        hits == 0 || counted.loss_seen > 0 && lost(fewer) * 100.0 <= LOSS_BEARABLE_PERCENT
    });
    let give_up = LESS
        .iter()
        .zip(bearable)
        .filter(|(_, bearable)| *bearable && known);
    let give_up_percent = give_up.map(|(percent, _)| *percent).max().unwrap_or(0);
    let worth = MORE
        .iter()
        .zip(gain)
        .find(|(_, gain)| *gain >= GAIN_WORTH_PERCENT && known);
    let can_give_up_bytes = vm.charged_bytes * give_up_percent / 100;
    let advice = if !known {
        format!("too few gets to tell: {gets} of {GETS_MIN}")
    } else if let Some((more, gain)) = worth {
        format!("{more} % more room would make {gain:.0} % more of its gets hits")
    } else if can_give_up_bytes > 0 {
        format!(
            "{give_up_percent} % less would do: {}",
            size(can_give_up_bytes)
        )
    } else {
        "it has what it needs".into()
    };
    Advice {
        name: vm.name.clone(),
        gets,
        hit_percent: known.then(|| of_gets(hits as f64)),
        gain_percent: known.then_some(gain),
        loss_percent: known.then_some(loss),
        can_give_up_bytes,
        confidence,
        advice,
    }
}

/// Advises on one VM or all.
pub fn run(reach: &Reach, arguments: &AdviseArguments) -> Result<Said, Failure> {
    let look = || {
        let vm = arguments.vm.clone();
        in_time(&reach.daemon(), reach, move |reach| stats(reach, vm)).map(|reply| reply.vms)
    };
    let mut before = Vec::new();
    if let Some(seconds) = arguments.over {
        before = look()?;
        std::thread::sleep(Duration::from_secs(seconds));
    }
    let all: Vec<Advice> = look()?
        .iter()
        .map(|vm| {
            let counted = Counted::of(vm);
            let counted = match before.iter().find(|before| before.name == vm.name) {
                Some(before) => counted.since(&Counted::of(before)),
                None => counted,
            };
            advice(vm, &counted)
        })
        .collect();
    let columns = [
        ("NAME", Align::Left),
        ("GETS", Align::Right),
        ("HITS", Align::Right),
        ("+25 %", Align::Right),
        ("+50 %", Align::Right),
        ("+100 %", Align::Right),
        ("-25 %", Align::Right),
        ("-50 %", Align::Right),
        ("-75 %", Align::Right),
        ("CAN GIVE UP", Align::Right),
        ("CONFIDENCE", Align::Left),
        ("ADVICE", Align::Left),
    ];
    let row = |advice: &Advice| {
        let signed = |values: Option<[f64; 3]>, sign: &str| {
            values.map_or(["-"; 3].map(String::from), |values| {
                values.map(|value| format!("{sign}{value:.1}"))
            })
        };
        let hits = advice.hit_percent.map(|hits| (hits * 10.0).round() as i64);
        let mut cells = vec![
            advice.name.clone(),
            advice.gets.to_string(),
            hits.map_or("-".into(), |hits| percent(hits, 1000)),
        ];
        cells.extend(signed(advice.gain_percent, "+"));
        cells.extend(signed(advice.loss_percent, "-"));
        cells.extend([
            size(advice.can_give_up_bytes),
            advice.confidence.into(),
            advice.advice.clone(),
        ]);
        cells
    };
    let text = table(&columns, &all.iter().map(row).collect::<Vec<_>>());
    Said::reply(text, &serde_json::json!({ "vms": all }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vm() -> VmStats {
        crate::top::tests::vm("web", 0, 0, 0)
    }

    fn advise(change: impl FnOnce(&mut VmStats)) -> Advice {
        let mut vm = vm();
        vm.charged_bytes = 100 << 20;
        change(&mut vm);
        advice(&vm, &Counted::of(&vm))
    }

    #[test]
    fn few_gets_say_nothing() {
        let said = advise(|vm| (vm.gets, vm.hits) = (GETS_MIN - 1, 3));
        assert_eq!((said.confidence, said.can_give_up_bytes), ("none", 0));
        assert_eq!((said.gain_percent, said.loss_percent), (None, None));
        assert!(said.advice.contains("too few"), "{}", said.advice);
    }

    #[test]
    fn the_smallest_step_that_is_worth_it() {
        let said = advise(|vm| {
            (vm.gets, vm.hits) = (100_000, 50_000);
            vm.gain_hits = vec![1_000, 10_000, 90_000];
            vm.loss_hits = vec![10_000, 20_000, 40_000];
            vm.loss_hits_seen = 50_000;
        });
        assert_eq!(
            said.gain_percent,
            Some([1.0, 10.0, 50.0]),
            "no more than misses"
        );
        assert_eq!(said.loss_percent, Some([10.0, 20.0, 40.0]));
        assert_eq!((said.confidence, said.can_give_up_bytes), ("good", 0));
        assert!(said.advice.starts_with("50 % more"), "{}", said.advice);
    }

    #[test]
    fn what_no_hit_needs_can_go() {
        let said = advise(|vm| {
            (vm.gets, vm.hits) = (20_000, 19_000);
            vm.loss_hits = vec![0, 50, 9_000];
            vm.loss_hits_seen = 18_000;
        });
        assert_eq!((said.confidence, said.can_give_up_bytes), ("low", 50 << 20));
        assert!(said.advice.starts_with("50 % less"), "{}", said.advice);
        // Hits, and nothing known of them.
        let said = advise(|vm| (vm.gets, vm.hits) = (20_000, 19_000));
        assert_eq!(said.can_give_up_bytes, 0);
    }

    #[test]
    fn an_interval_counts_alone() {
        let (mut before, mut after) = (vm(), vm());
        (before.gets, before.hits, before.gain_hits) = (100, 50, vec![1, 2, 3]);
        (after.gets, after.hits, after.gain_hits) = (300, 90, vec![11, 2, 30]);
        let counted = Counted::of(&after).since(&Counted::of(&before));
        assert_eq!(
            (counted.gets, counted.hits, counted.gain),
            (200, 40, [10, 0, 27])
        );
        let anew = Counted::of(&before).since(&Counted::of(&after));
        assert_eq!(anew.gets, 100);
    }
}
