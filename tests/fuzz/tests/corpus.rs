// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Runs the fuzz targets with all inputs of the corpus, without libFuzzer.

use std::path::Path;
use std::process::Command;

/// Runs a fuzz target with each input of its corpus: the inputs in the archive, and the inputs
/// whose files have descriptive names.
fn play(target: &str) {
    let (_, run) = tmem_fuzz::TARGETS
        .iter()
        .find(|(name, _)| *name == target)
        .unwrap();
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("targets/corpus");
    let unpacked = tempfile::tempdir().unwrap();
    let archive = corpus.join(format!("{target}.tar.gz"));
    let mut tar = Command::new("tar");
    tar.arg("-xzf").arg(&archive).arg("-C").arg(unpacked.path());
    assert!(
        tar.status().unwrap().success(),
        "cannot unpack {}",
        archive.display()
    );
    let inputs = |directory: &Path| -> Vec<_> {
        let files = std::fs::read_dir(directory).unwrap();
        files.map(|file| file.unwrap().path()).collect()
    };
    let mut files = inputs(unpacked.path());
    assert!(files.len() > 1, "{} has no files", archive.display());
    let named = corpus.join(target);
    if named.exists() {
        files.extend(inputs(&named));
    }
    files.sort();
    for file in files {
        println!("{}", file.display());
        run(&std::fs::read(&file).unwrap());
    }
}

#[test]
fn requests_of_the_fuzz_corpus_cause_no_violation() {
    play("requests");
}

#[test]
fn rings_of_the_fuzz_corpus_cause_no_violation() {
    play("rings");
}

#[test]
fn messages_of_the_fuzz_corpus_cause_no_violation() {
    play("messages");
}
