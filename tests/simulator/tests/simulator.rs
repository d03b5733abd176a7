// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of the simulator itself: a seed always gives the same run, each broken rule is detected,
//! and a failing script is shortened. `make check` runs thousands of seeds.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;

use tmem_simulator::{Mutation, Script, Step, run, run_seeds, run_traced, shrink};

/// Number of seeds within which the simulator must detect each broken rule. `make check` runs as
/// many seeds without a broken rule.
const SEEDS: u64 = 4_000;

fn trace(script: &Script) -> Vec<String> {
    let mut lines = Vec::new();
    let outcome = run_traced(script, |line| lines.push(line));
    lines.push(format!("{outcome:?}"));
    lines
}

#[test]
fn equal_seeds_give_identical_runs() {
    for seed in 1..=20 {
        let script = Script::draw(seed, None);
        let (once, again) = (trace(&script), trace(&Script::draw(seed, None)));
        for (a, b) in once.iter().zip(&again) {
            assert_eq!(a, b, "two runs with TMEM_SEED={seed} differ");
        }
        assert_eq!(
            once.len(),
            again.len(),
            "two runs with TMEM_SEED={seed} have different lengths"
        );
    }
}

/// Runs all seeds without a mutation (broken rule); no seed may fail. Together, the runs must
/// contain pages that were stored, hit, refused, lost and retained, stale requests, and REFs that
/// were answered with HELD and with GONE.
#[test]
fn no_simulated_run_fails_without_a_mutation() {
    let totals = run_seeds((1, 150), None, 2, |_| {});
    if let Some(found) = totals.found {
        panic!(
            "the run with TMEM_SEED={} failed: {:?}",
            found.seed, found.failure
        );
    }
    assert_eq!(totals.seeds, 150);
    let names = [
        "stored",
        "hits",
        "refused",
        "lost",
        "stale",
        "retained",
        "refs_held",
        "refs_gone",
    ];
    for (name, count) in names.iter().zip(totals.counts) {
        assert!(
            count > 0,
            "the test is too weak: the counter {name} is 0 in all runs"
        );
    }
}

/// The scripts of 200 seeds together contain each kind of step.
#[test]
fn random_scripts_contain_each_kind_of_step() {
    let mut seen: BTreeMap<String, u32> = BTreeMap::new();
    for seed in 1..=200 {
        for step in Script::draw(seed, None).steps {
            let text = format!("{step:?}");
            let name = text.split('(').next().unwrap_or_default();
            *seen.entry(name.to_string()).or_default() += 1;
        }
    }
    assert_eq!(
        seen.len(),
        45,
        "the scripts do not contain exactly 45 kinds of steps: {seen:?}"
    );
}

/// Reads the table of docs/simulator.md. Returns the rule that fails and the seed that finds it,
/// for each mutation.
fn table() -> BTreeMap<String, (String, String)> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/simulator.md");
    let text = std::fs::read_to_string(path).expect("cannot read docs/simulator.md");
    let (_, rest) = text
        .split_once("<!-- table: mutations -->\n")
        .expect("docs/simulator.md has no table of mutations");
    let rows = rest
        .lines()
        .take_while(|line| line.starts_with('|'))
        .skip(2);
    let row = |line: &str| {
        let cells: Vec<&str> = line
            .split('|')
            .map(|cell| cell.trim().trim_matches('`'))
            .collect();
        let [_, name, _, _, rule, seed, _] = cells[..] else {
            panic!("a row of {path} does not have five cells: {line}");
        };
        (name.to_string(), (rule.to_string(), seed.to_string()))
    };
    rows.map(row).collect()
}

/// docs/simulator.md lists each mutation (rule that can be broken), and no mutation that does not
/// exist.
#[test]
fn simulator_documentation_lists_exactly_the_mutations() {
    let known = Mutation::ALL.iter().map(|m| format!("{m:?}"));
    let known: BTreeSet<String> = known.collect();
    assert!(
        table().keys().eq(&known),
        "the table of docs/simulator.md does not list exactly the mutations of the code: {:?}",
        table().keys()
    );
}

#[test]
fn the_simulator_detects_each_mutation() {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let (mut missed, mut others) = (Vec::new(), Vec::new());
    let table = table();
    for &mutation in Mutation::ALL {
        let totals = run_seeds((1, SEEDS), Some(mutation), threads, |_| {});
        // Write the table directly to stdout, because the test harness captures the output of
        // println.
        let mut out = std::io::stdout();
        let _ = match &totals.found {
            Some(found) => writeln!(
                out,
                "{mutation:?}: {} after {} seeds: {}",
                found.failure.rule, found.seed, found.failure.what
            ),
            None => writeln!(out, "{mutation:?}: not detected in {SEEDS} seeds"),
        };
        let Some(found) = totals.found else {
            missed.push(mutation);
            continue;
        };
        let found = (found.failure.rule.to_string(), found.seed.to_string());
        if table.get(&format!("{mutation:?}")) != Some(&found) {
            others.push((mutation, found));
        }
    }
    assert!(
        missed.is_empty(),
        "no seed detected the mutations {missed:?}"
    );
    assert!(
        others.is_empty(),
        "the table of docs/simulator.md has other rules or seeds than these runs: {others:?}"
    );
}

/// The output of a failing simulator run contains a complete command that replays the run.
#[test]
fn a_failed_simulation_prints_its_replay_command() {
    let mut program = std::process::Command::new(env!("CARGO_BIN_EXE_tmem-simulator"));
    let program = program.args(["--mutation", "MissTaken", "--seeds", "20"]);
    let output = program
        .env_remove("TMEM_SEED")
        .output()
        .expect("cannot run the simulator");
    let stdout = String::from_utf8_lossy(&output.stdout);
    let command = "cargo run --release -p tmem-simulator -- --mutation MissTaken --trace";
    assert!(
        stdout.contains(command),
        "the simulator's output lacks the command that repeats the failed run: {stdout}"
    );
    assert_eq!(
        output.status.code(),
        Some(1),
        "the simulator did not end with code 1: {stdout}"
    );
}

#[test]
fn a_failing_script_is_shrunk_to_its_necessary_steps() {
    let mutation = Some(Mutation::MissTaken);
    let found = run_seeds((1, 200), mutation, 1, |_| {}).found;
    let found = found.expect("no seed detected the mutation MissTaken");
    let script = Script::draw(found.seed, mutation);
    let (short, failure) = shrink(&script).expect("shrink() did not reproduce the failure");
    assert_eq!(failure.rule, found.failure.rule);
    assert!(
        short.steps.len() < 20,
        "the shortened script has 20 steps or more: {:?}",
        short.steps
    );
    // Check that the shrunk script fails by itself, and that each of its steps is needed for the
    // failure.
    assert_eq!(run(&short).failure.map(|(_, f)| f), Some(failure.clone()));
    for leave_out in 0..short.steps.len() {
        let mut steps: Vec<Step> = short.steps.clone();
        steps.remove(leave_out);
        let setup = short.setup.clone();
        let outcome = run(&Script { setup, steps });
        let same = outcome.failure.is_some_and(|(_, f)| f.rule == failure.rule);
        assert!(
            !same,
            "the shortened script also fails without step {leave_out}: {:?}",
            short.steps
        );
    }
}
