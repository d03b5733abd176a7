// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests that man, groff and the shells accept the man pages and completions that tmem-manual
//! writes.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Programs for which tmem-manual writes man pages and completions.
const PROGRAMS: [&str; 4] = ["tmemd", "tmemctl", "tmem-libvirt", "tmem-exporter"];

/// Writes all man pages and completions to a temporary directory.
fn written() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("cannot create a directory");
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let mut command = Command::new(env!("CARGO_BIN_EXE_tmem-manual"));
    let done = run(command.arg("--docs").arg(docs).arg(folder.path()));
    assert!(done.status.success(), "tmem-manual failed: {done:?}");
    folder
}

/// Runs a program (man, groff or a shell) that `scripts/deps test` installs.
fn run(command: &mut Command) -> Output {
    command.output().unwrap_or_else(|error| {
        panic!("cannot run {command:?}: {error}; scripts/deps test installs it")
    })
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("the directory does not exist");
    entries
        .map(|entry| entry.expect("cannot read the directory").path())
        .collect()
}

/// Returns the warnings that man and groff print for a man page.
fn warnings(page: &Path) -> String {
    let mut command = Command::new("man");
    command
        .args(["--warnings", "-E", "UTF-8", "-l", "-Tutf8", "-Z"])
        .arg(page);
    command
        .env("LC_ALL", "C.UTF-8")
        .env("MANROFFSEQ", "")
        .env("MANWIDTH", "80");
    let done = run(&mut command);
    let failed = if done.status.success() {
        ""
    } else {
        "man failed: "
    };
    failed.to_owned() + &String::from_utf8_lossy(&done.stderr)
}

/// Returns the text of a man page as a terminal of 80 columns shows it.
fn shown(page: &Path) -> String {
    let mut command = Command::new("man");
    command.arg("-l").arg(page);
    command
        .env("LC_ALL", "C.UTF-8")
        .env("MANWIDTH", "80")
        .env("MAN_KEEP_FORMATTING", "");
    String::from_utf8_lossy(&run(&mut command).stdout).into_owned()
}

#[test]
fn man_renders_the_pages_without_warnings() {
    let folder = written();
    let pages = files(&folder.path().join("man"));
    assert!(
        pages.len() > PROGRAMS.len(),
        "too few pages were written: {pages:?}"
    );
    for page in pages {
        assert_eq!(
            warnings(&page),
            "",
            "man prints warnings for {}",
            page.display()
        );
    }
}

#[test]
fn man_warns_of_a_broken_page() {
    let folder = tempfile::tempdir().expect("cannot create a directory");
    let page = folder.path().join("broken.8");
    fs::write(&page, ".TH A 8\n.SH NAME\na \\- b\n.TS\n.nosuchrequest\n")
        .expect("cannot write the file");
    assert_ne!(warnings(&page), "");
}

#[test]
fn manual_pages_of_all_commands_and_file_formats_exist() {
    let folder = written();
    let names: BTreeSet<String> = files(&folder.path().join("man"))
        .iter()
        .map(|path| {
            path.file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned()
        })
        .collect();
    let mut wanted: Vec<String> = PROGRAMS.iter().map(|name| format!("{name}.8")).collect();
    wanted.extend(["tmem-hook.8", "tmemctl-attach.8", "tmemctl-list.8"].map(String::from));
    wanted.extend(["tmemd.toml.5", "tmem-cache.5", "tmem-trace.5"].map(String::from));
    for name in wanted {
        assert!(names.contains(&name), "there is no page {name}: {names:?}");
    }
    // Check that the page of a command has its subcommands, further sections, options and
    // references to other pages.
    let page = folder.path().join("man/tmemctl.8");
    let text = shown(&page);
    for name in ["tmemctl-attach(8)", "EXIT CODES", "--timeout", "tmemd(8)"] {
        assert!(text.contains(name), "tmemctl(8) has no {name:?}:\n{text}");
    }
    let text = shown(&folder.path().join("man/tmemd.toml.5"));
    for name in ["SETTINGS", "pool_size", "trust_domain", "USERS AND GROUPS"] {
        assert!(
            text.contains(name),
            "tmemd.toml(5) has no {name:?}:\n{text}"
        );
    }
}

#[test]
fn references_between_manual_pages_are_valid() {
    let folder = written();
    let man = folder.path().join("man");
    for page in files(&man) {
        let text = fs::read_to_string(&page)
            .expect("cannot read the page")
            .replace('\\', "");
        let also = text.split(".SH \"SEE ALSO\"\n").nth(1).unwrap_or_default();
        for name in also
            .split([',', '\n'])
            .map(str::trim)
            .filter(|name| name.contains('('))
        {
            let file = name.replace('(', ".").replace(')', "");
            let known = name == "virsh(1)" || man.join(&file).exists();
            assert!(
                known,
                "{} refers to {name}, which does not exist",
                page.display()
            );
        }
    }
}

#[test]
fn shells_accept_the_completions() {
    let folder = written();
    for program in PROGRAMS {
        for (shell, file) in [
            ("bash", format!("bash/{program}.bash")),
            ("zsh", format!("zsh/_{program}")),
            ("fish", format!("fish/{program}.fish")),
        ] {
            let file = folder.path().join(file);
            let done = run(Command::new(shell).arg("-n").arg(&file));
            assert!(
                done.status.success(),
                "{shell} refuses the completion file {}: {done:?}",
                file.display()
            );
        }
    }
}

/// Returns the words that bash and fish offer as completions of `tmemctl st`.
fn offered(folder: &Path) -> [String; 2] {
    let bash = "source \"$0/bash/tmemctl.bash\"; COMP_WORDS=(tmemctl st); COMP_CWORD=1; \
                _tmemctl tmemctl st tmemctl; echo \"${COMPREPLY[@]}\"";
    let fish = "source $argv[1]/fish/tmemctl.fish; complete -C 'tmemctl st'";
    let bash = run(Command::new("bash").arg("-c").arg(bash).arg(folder));
    let mut command = Command::new("fish");
    command.arg("-c").arg(fish).arg(folder).env("HOME", folder);
    let fish = run(&mut command);
    [bash, fish].map(|done| String::from_utf8_lossy(&done.stdout).trim().to_owned())
}

#[test]
fn shell_completions_offer_commands() {
    let folder = written();
    let [bash, fish] = offered(folder.path());
    assert_eq!(bash, "stats");
    assert_eq!(
        fish.split('\t').next(),
        Some("stats"),
        "fish offers the wrong command: {fish}"
    );
}
