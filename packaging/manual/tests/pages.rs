// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests that man and the shells accept the man pages and completions.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Runs a program and returns its output and its errors. `scripts/deps test` installs all programs.
fn run(command: &mut Command) -> String {
    let done = command
        .output()
        .unwrap_or_else(|error| panic!("cannot run {command:?}: {error}; run scripts/deps test"));
    let text = [done.stdout, done.stderr].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    assert!(done.status.success(), "{command:?} failed: {text}");
    text
}

/// Writes all man pages and completions to a temporary directory.
fn written() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("cannot create a directory");
    run(Command::new(env!("CARGO_BIN_EXE_tmem-manual")).arg(folder.path()));
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("documents");
    run(Command::new(script).arg(folder.path()));
    folder
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("the directory does not exist");
    entries
        .map(|entry| entry.expect("cannot read the directory").path())
        .collect()
}

#[test]
fn man_renders_the_pages_without_warnings() {
    let folder = written();
    let man = folder.path().join("man");
    for name in ["tmemd.8", "tmemctl-attach.8", "tmem-hook.8", "tmemd.toml.5"] {
        assert!(man.join(name).exists(), "there is no page {name}");
    }
    for page in files(&man) {
        let mut command = Command::new("man");
        command
            .args(["--warnings", "-E", "UTF-8", "-l"])
            .arg(&page)
            .envs([("LC_ALL", "C.UTF-8"), ("MANWIDTH", "80")])
            .stdout(Stdio::null());
        assert_eq!(run(&mut command), "", "{}", page.display());
        // lexgrog reads the name and the description of a page as apropos does.
        run(Command::new("lexgrog").arg(&page));
    }
    let text = run(Command::new("man").arg("-l").arg(man.join("tmemd.toml.5")));
    for word in ["pool_size", "trust_domain", "Users and groups"] {
        assert!(text.contains(word), "tmemd.toml(5) has no {word}: {text}");
    }
}

#[test]
fn shells_accept_the_completions() {
    let folder = written();
    for shell in ["bash", "zsh", "fish"] {
        let files = files(&folder.path().join(shell));
        assert_eq!(files.len(), 4, "{shell} has completions of other programs");
        for file in files {
            run(Command::new(shell).arg("-n").arg(file));
        }
    }
}
