// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tmemctl advise`: prints what each VM would gain from more memory in the pool, and how much
//! memory it could give up.
//!
//! The engine (library tmem-pool) follows a sample of each VM's keys (`tmem_trace::estimate`). From
//! this sample, it estimates how many misses would be hits with more memory, and how many hits
//! would be misses with less memory. It also knows the error bounds of both estimates. This file
//! turns the estimates into sentences. Out of scope: changing a quota.

use crate::client::stats;
use crate::exit::Failure;
use crate::output::Output;
use crate::reach::{Reach, within_timeout};
use crate::show::{percent_word, size_or_dash};
use crate::table::{Align, Column, TableArguments, choose, column, size};
use clap::Args;
use serde::Serialize;
use std::time::Duration;
use tmem_control::VmStats;
use tmem_trace::estimate::{
    ESTIMATE_GETS_MIN, ESTIMATE_GETS_PER_PAGE, GAIN_OVER_MAX, GAIN_OVER_USUAL, GAIN_PERCENT,
    GAIN_UNDER_MAX, GIVE_UP_COST_MAX, LOSS_BEARABLE, LOSS_PERCENT, LOSS_UNDER_MAX,
    LOSS_UNDER_USUAL,
};

/// Smallest number of a VM's gets on which advice may be based. With fewer gets, or fewer than the VM
/// has pages, the estimates were less accurate in measurements than their error bounds say.
const GETS_MIN: i64 = ESTIMATE_GETS_MIN as i64;
/// Smallest number of a VM's gets with which the confidence in advice may be "good". Most of the
/// traces from which the error bounds were derived have at least this many gets.
const GETS_GOOD: i64 = 20_000;

/// Smallest gain for which `advise` recommends more memory: additional hits in percent of all gets.
const GAIN_WORTH_PERCENT: f64 = 2.0;

/// Options of `advise`: the VM and the period.
#[derive(Args, Clone)]
pub struct AdviseArguments {
    /// Show only this VM
    vm: Option<String>,
    /// Use the next SECONDS seconds instead of the time since the daemon's start
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    over: Option<u64>,
    #[command(flatten)]
    table: TableArguments,
}

/// Advice for one VM, with the figures on which it is based.
#[derive(Debug, PartialEq, Serialize)]
pub struct Advice {
    name: String,
    gets: i64,
    hit_percent: Option<f64>,
    /// Additional hits with 25, 50 and 100 % more memory, in percent of all gets.
    gain_percent: Option<[f64; 3]>,
    /// Lost hits with 25, 50 and 75 % less memory, in percent of all gets.
    loss_percent: Option<[f64; 3]>,
    can_give_up_bytes: i64,
    /// Memory of the VM that the host does not spend: the guest has returned or never used it.
    /// None if it is not known.
    returned_bytes: Option<i64>,
    /// Confidence in the advice: "none", "low" or "good".
    confidence: &'static str,
    advice: String,
}

/// Counters of a VM since the daemon's start, or their growth since an earlier poll.
struct Counted {
    gets: i64,
    hits: i64,
    gain: [i64; 3],
    loss: [i64; 3],
    loss_seen: i64,
}

/// Returns the first three numbers of a list; 0 instead of missing ones.
fn first_three(numbers: &[i64]) -> [i64; 3] {
    std::array::from_fn(|nth| numbers.get(nth).copied().unwrap_or(0))
}

impl Counted {
    fn new(vm: &VmStats) -> Counted {
        Counted {
            gets: vm.gets,
            hits: vm.hits,
            gain: first_three(&vm.gain_hits),
            loss: first_three(&vm.loss_hits),
            loss_seen: vm.loss_hits_seen,
        }
    }

    fn since(self, before: &Counted) -> Counted {
        // A smaller number of gets than before means that the daemon was restarted and counts from
        // 0 again.
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
    // The estimator extrapolates from a sample of the keys, so its sums can exceed the number of
    // misses or hits.
    let gain = counted
        .gain
        .map(|more| of_gets(more.clamp(0, (gets - hits).max(0)) as f64));
    let lost = |fewer: i64| fewer as f64 / counted.loss_seen.max(1) as f64;
    let loss = counted
        .loss
        .map(|fewer| of_gets(hits as f64 * lost(fewer).clamp(0.0, 1.0)));
    let needed = GETS_MIN.max(vm.pages);
    let known = gets >= needed;
    let per_page = ESTIMATE_GETS_PER_PAGE as i64;
    let enough = gets >= GETS_GOOD.max(vm.pages.saturating_mul(per_page));
    let worth = GAIN_PERCENT
        .iter()
        .zip(gain)
        .find(|(_, gain)| *gain >= GAIN_WORTH_PERCENT && known);
    let bearable = |fewer| match hits {
        // A VM without hits can lose none. But it may be reading all its data for the first time,
        // so hits may follow. Enough gets for each page rule that out.
        0 => enough,
        _ => counted.loss_seen > 0 && lost(fewer) * 100.0 <= LOSS_BEARABLE,
    };
    // A VM that would gain from more memory is not advised to give up memory.
    let give_up = LOSS_PERCENT
        .iter()
        .zip(counted.loss)
        .filter(|(_, fewer)| known && worth.is_none() && bearable(*fewer));
    let give_up_percent = give_up.map(|(percent, _)| *percent).max().unwrap_or(0);
    let can_give_up_bytes = vm.charged_bytes * give_up_percent as i64 / 100;
    let has_enough = of_gets((gets - hits) as f64) < GAIN_WORTH_PERCENT;
    // The confidence is "good" only if an estimate that is wrong by the usual error would lead to
    // the same advice. 95 of 100 estimates have at most that error.
    let holds = match worth {
        Some((_, gain)) => gain > GAIN_OVER_USUAL,
        None => can_give_up_bytes > 0 || has_enough,
    };
    let confidence = match (known, enough && holds) {
        (false, _) => "none",
        (true, false) => "low",
        (true, true) => "good",
    };
    let no_hits = if hits == 0 { "no hits: " } else { "" };
    let advice = if !known {
        format!("too few gets for advice: the VM has had {gets}, and {needed} are needed")
    } else if let Some((more, gain)) = worth {
        let least = (gain - GAIN_OVER_USUAL).max(0.0);
        format!(
            "{no_hits}{more} % more memory would turn another {gain:.0} % of the VM's gets into hits, \
             probably at least {least:.0} %"
        )
    } else if can_give_up_bytes > 0 && hits == 0 {
        format!(
            "no hits: {give_up_percent} % less memory ({}) would lose none; twice the memory is \
             not expected to bring any",
            size(can_give_up_bytes)
        )
    } else if can_give_up_bytes > 0 {
        format!(
            "can give up {give_up_percent} % of its memory in the pool: {}",
            size(can_give_up_bytes)
        )
    } else if has_enough {
        "the VM has enough memory in the pool".into()
    } else {
        format!("{no_hits}neither more nor less memory is known to be worthwhile")
    };
    Advice {
        name: vm.name.clone(),
        gets,
        hit_percent: known.then(|| of_gets(hits as f64)),
        gain_percent: known.then_some(gain),
        loss_percent: known.then_some(loss),
        can_give_up_bytes,
        returned_bytes: vm
            .memory_resident_bytes
            .map(|resident| (vm.memory_bytes - resident).max(0)),
        confidence,
        advice,
    }
}

/// Returns the text below the table, which states the error bounds of the table's columns. The
/// bounds were derived from replays of recorded and generated loads.
fn error_bounds_text() -> String {
    format!(
        "All estimates and errors are in percent of all gets. The errors were measured with recorded \
         and generated loads.\n95 of 100 estimates for more memory are at most {GAIN_OVER_USUAL} \
         too high, and none is {GAIN_OVER_MAX} too high or {GAIN_UNDER_MAX} too low.\n95 of 100 \
         estimates for less memory are at most {LOSS_UNDER_USUAL} too low, and none is \
         {LOSS_UNDER_MAX} too low; many are far too high.\nA VM that gives up the memory in \
         CAN-GIVE-UP loses hits of at most {GIVE_UP_COST_MAX}.\n"
    )
}

fn signed_text(values: Option<[f64; 3]>, nth: usize, sign: &str) -> String {
    values.map_or("-".into(), |values| format!("{sign}{:.1}", values[nth]))
}

/// Columns of the table that `tmemctl advise` prints.
const COLUMNS: [Column<Advice>; 13] = [
    column("NAME", Align::Left, |advice, _| advice.name.clone()),
    column("GETS", Align::Right, |advice, _| advice.gets.to_string()),
    column("HIT-RATE", Align::Right, |advice, _| {
        let hits = advice.hit_percent.map(|hits| (hits * 10.0).round() as i64);
        hits.map_or("-".into(), |hits| percent_word(hits, 1000))
    }),
    column("+25%", Align::Right, |advice, _| {
        signed_text(advice.gain_percent, 0, "+")
    }),
    column("+50%", Align::Right, |advice, _| {
        signed_text(advice.gain_percent, 1, "+")
    }),
    column("+100%", Align::Right, |advice, _| {
        signed_text(advice.gain_percent, 2, "+")
    }),
    column("-25%", Align::Right, |advice, _| {
        signed_text(advice.loss_percent, 0, "-")
    }),
    column("-50%", Align::Right, |advice, _| {
        signed_text(advice.loss_percent, 1, "-")
    }),
    column("-75%", Align::Right, |advice, _| {
        signed_text(advice.loss_percent, 2, "-")
    }),
    column("CAN-GIVE-UP", Align::Right, |advice, sizes| {
        sizes.text(advice.can_give_up_bytes)
    }),
    column("RETURNED", Align::Right, |advice, sizes| {
        size_or_dash(advice.returned_bytes, sizes)
    }),
    column("CONFIDENCE", Align::Left, |advice, _| {
        advice.confidence.into()
    }),
    column("ADVICE", Align::Left, |advice, _| advice.advice.clone()),
];

/// Prints the advice for the VM that the user named, or for all VMs.
pub fn run(reach: &Reach, arguments: &AdviseArguments) -> Result<Output, Failure> {
    let poll = || {
        let vm = arguments.vm.clone();
        within_timeout(&reach.daemon(), reach, move |reach| stats(reach, vm)).map(|reply| reply.vms)
    };
    let mut before = Vec::new();
    if let Some(seconds) = arguments.over {
        before = poll()?;
        std::thread::sleep(Duration::from_secs(seconds));
    }
    let all: Vec<Advice> = poll()?
        .iter()
        .map(|vm| {
            let counted = Counted::new(vm);
            let counted = match before.iter().find(|before| before.name == vm.name) {
                Some(before) => counted.since(&Counted::new(before)),
                None => counted,
            };
            advice(vm, &counted)
        })
        .collect();
    let mut text = choose(&COLUMNS, &all, &arguments.table)?;
    if arguments.table.is_chosen() {
        return Output::from_reply(text, &serde_json::json!({ "vms": all }));
    }
    if all.iter().any(|advice| advice.hit_percent.is_some()) {
        text += &error_bounds_text();
    }
    Output::from_reply(text, &serde_json::json!({ "vms": all }))
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
        advice(&vm, &Counted::new(&vm))
    }

    #[test]
    fn too_few_gets_give_no_advice() {
        let advice = advise(|vm| (vm.gets, vm.hits) = (GETS_MIN - 1, 3));
        assert_eq!((advice.confidence, advice.can_give_up_bytes), ("none", 0));
        assert_eq!((advice.gain_percent, advice.loss_percent), (None, None));
        assert!(
            advice.advice.contains("too few"),
            "the advice does not say that gets are too few: {}",
            advice.advice
        );
    }

    #[test]
    fn advice_names_the_smallest_worthwhile_increase() {
        let advice = advise(|vm| {
            (vm.gets, vm.hits) = (100_000, 50_000);
            vm.gain_hits = vec![1_000, 10_000, 90_000];
            vm.loss_hits = vec![10_000, 20_000, 40_000];
            vm.loss_hits_seen = 50_000;
        });
        assert_eq!(
            advice.gain_percent,
            Some([1.0, 10.0, 50.0]),
            "the estimated gain exceeds the number of misses"
        );
        assert_eq!(advice.loss_percent, Some([10.0, 20.0, 40.0]));
        assert_eq!((advice.confidence, advice.can_give_up_bytes), ("good", 0));
        assert!(
            advice.advice.starts_with("50 % more"),
            "the advice does not name 50 % more memory: {}",
            advice.advice
        );
        assert!(
            advice.advice.ends_with("probably at least 1 %"),
            "the advice does not give the least gain: {}",
            advice.advice
        );
    }

    #[test]
    fn a_vm_can_give_up_memory_that_no_hit_needs() {
        let advice = advise(|vm| {
            (vm.gets, vm.hits) = (GETS_GOOD - 1, 19_000);
            vm.loss_hits = vec![0, 50, 9_000];
            vm.loss_hits_seen = 18_000;
        });
        assert_eq!(
            (advice.confidence, advice.can_give_up_bytes),
            ("low", 50 << 20)
        );
        assert!(
            advice.advice.starts_with("can give up 50 %"),
            "the advice does not allow 50 % less memory: {}",
            advice.advice
        );
        // The VM has hits, but the estimator's sample of its keys had no hits.
        let advice = advise(|vm| (vm.gets, vm.hits) = (20_000, 19_000));
        assert_eq!(advice.can_give_up_bytes, 0);
    }

    #[test]
    fn a_vm_that_gains_from_more_memory_gives_up_none() {
        for hits in [0, 10_000] {
            let advice = advise(|vm| {
                (vm.gets, vm.hits) = (100_000, hits);
                vm.gain_hits = vec![0, 0, 2_000];
                (vm.loss_hits, vm.loss_hits_seen) = (vec![0, 0, 0], hits);
            });
            assert_eq!(
                advice.can_give_up_bytes, 0,
                "a VM with {hits} hits is advised to give up memory"
            );
            let no_hits = advice.advice.starts_with("no hits: 100 % more");
            assert_eq!(
                no_hits,
                hits == 0,
                "{hits} hits: the advice has the wrong text: {}",
                advice.advice
            );
        }
    }

    #[test]
    fn a_vm_without_hits_can_give_up_memory_after_enough_gets_per_page() {
        let thrashing = |gets, pages| advise(|vm| (vm.gets, vm.pages) = (gets, pages));
        let advice = thrashing(50_000, 5_000);
        assert_eq!(
            (advice.confidence, advice.can_give_up_bytes),
            ("good", 75 << 20)
        );
        assert!(
            advice.advice.starts_with("no hits: 75 % less"),
            "the advice has the wrong text: {}",
            advice.advice
        );
        // With fewer gets than GETS_GOOD, or fewer than 10 gets for each page, the VM may still be
        // reading its data for the first time. The advice is then to change nothing.
        for (gets, pages) in [(50_000, 5_001), (GETS_GOOD - 1, 10)] {
            let advice = thrashing(gets, pages);
            assert_eq!((advice.confidence, advice.can_give_up_bytes), ("low", 0));
            assert!(
                advice.advice.starts_with("no hits: neither"),
                "the advice has the wrong text: {}",
                advice.advice
            );
        }
    }

    #[test]
    fn confidence_is_good_if_the_gain_exceeds_the_usual_error() {
        let gains = |gain: f64, pages| {
            advise(|vm| {
                (vm.gets, vm.hits, vm.pages) = (100_000, 50_000, pages);
                vm.gain_hits = vec![(gain * 1_000.0) as i64; 3];
            })
            .confidence
        };
        assert_eq!(gains(GAIN_OVER_USUAL + 0.1, 10_000), "good");
        assert_eq!(gains(GAIN_OVER_USUAL, 10_000), "low");
        assert_eq!(
            gains(GAIN_OVER_USUAL + 0.1, 10_001),
            "low",
            "the confidence is not low although there are fewer than 10 gets for each page"
        );
        // If `advise` estimates that a VM gains nothing, its confidence is low, because the
        // estimate may be wrong. The confidence is good if the VM has too few misses to gain
        // anything.
        assert_eq!(gains(0.0, 10_000), "low");
        let advice = advise(|vm| (vm.gets, vm.hits) = (100_000, 98_001));
        assert_eq!(
            (advice.confidence, &*advice.advice),
            ("good", "the VM has enough memory in the pool")
        );
    }

    #[test]
    fn advice_counts_memory_that_the_host_does_not_spend() {
        let advice = advise(|vm| {
            (vm.memory_bytes, vm.memory_resident_bytes) = (1 << 30, Some(300 << 20));
        });
        assert_eq!(advice.returned_bytes, Some(724 << 20));
        assert_eq!(
            advise(|vm| vm.memory_resident_bytes = None).returned_bytes,
            None
        );
    }

    #[test]
    fn the_help_states_the_error_bounds() {
        for bound in [
            "at most 9 too high",
            "none is 33 too high",
            "or 36 too low",
            "at most 5 too low",
            "none is 28 too low",
            "at most 2.",
        ] {
            assert!(
                error_bounds_text().contains(bound),
                "the error bounds do not contain {bound}: {}",
                error_bounds_text()
            );
        }
    }

    #[test]
    fn interval_counts_exclude_earlier_requests() {
        let (mut before, mut after) = (vm(), vm());
        (before.gets, before.hits, before.gain_hits) = (100, 50, vec![1, 2, 3]);
        (after.gets, after.hits, after.gain_hits) = (300, 90, vec![11, 2, 30]);
        let counted = Counted::new(&after).since(&Counted::new(&before));
        assert_eq!(
            (counted.gets, counted.hits, counted.gain),
            (200, 40, [10, 0, 27])
        );
        let since_restart = Counted::new(&before).since(&Counted::new(&after));
        assert_eq!(since_restart.gets, 100);
    }
}
