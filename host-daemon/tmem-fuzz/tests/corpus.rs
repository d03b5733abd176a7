// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Plays the inputs that the fuzzers found and that were kept.

use std::path::Path;

fn play(target: &str) {
    let (_, run) = tmem_fuzz::TARGETS
        .iter()
        .find(|(name, _)| *name == target)
        .unwrap();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../fuzz/corpus")
        .join(target);
    let mut files: Vec<_> = std::fs::read_dir(&folder)
        .unwrap()
        .map(|file| file.unwrap().path())
        .collect();
    files.sort();
    assert!(files.len() > 1, "no corpus in {}", folder.display());
    for file in files {
        println!("{}", file.display());
        run(&std::fs::read(&file).unwrap());
    }
}

#[test]
fn requests() {
    play("requests");
}

#[test]
fn rings() {
    play("rings");
}

#[test]
fn messages() {
    play("messages");
}
