// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checks that the guest and the oracle share no code with the daemon. With shared code, a mistake
//! in it could make the daemon wrong and hide this from the oracle. They share constants of the
//! protocol only.

use std::path::{Path, PathBuf};

/// Names by which a source file could use code of the daemon, or the structs with which the daemon
/// decodes requests and encodes answers.
const FORBIDDEN: [&str; 14] = [
    "use tmemd",
    "tmemd::",
    "tmem_pool",
    "tmem_control",
    "daemon::",
    "HeadlessDaemon",
    "TestDaemon",
    "zerocopy",
    "wire::Req",
    "wire::Resp",
    "wire::Put",
    "wire::Get",
    "wire::Ref",
    "wire::Generation",
];

/// Returns the source files below `directory`, without the module `daemon` and `lib.rs`, which
/// declares this module.
fn sources(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).expect("cannot list the source directory");
    let paths = entries.map(|entry| entry.expect("cannot read a directory entry").path());
    let paths = paths.filter(|path| {
        path.file_stem()
            .is_some_and(|name| name != "daemon" && name != "lib")
    });
    let below = |path: PathBuf| match path.is_dir() {
        true => sources(&path),
        false => vec![path],
    };
    paths.flat_map(below).collect()
}

#[test]
fn the_guest_and_the_oracle_use_no_code_of_the_daemon() {
    let files = sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"));
    for name in ["driver.rs", "model.rs", "requests.rs", "chains.rs"] {
        let known = files.iter().any(|file| file.ends_with(name));
        assert!(known, "the test found no source file {name}");
    }
    for file in files {
        let text = std::fs::read_to_string(&file).expect("cannot read a source file");
        // Ignore test modules: a test compares the sizes of the independent codec with the structs.
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        let lines = code.lines().filter(|line| !line.trim().starts_with("//"));
        for line in lines {
            let used = FORBIDDEN.iter().find(|name| line.contains(**name));
            assert_eq!(
                used,
                None,
                "{} uses the daemon's code: {line}",
                file.display()
            );
        }
    }
}
