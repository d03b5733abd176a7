// SPDX-License-Identifier: Apache-2.0 OR MIT
//! tmem-manual: writes the man pages and shell completions of the programs whose command lines are
//! defined with clap. The script `documents` adds the pages that are made of `docs/`.

use clap::{Command, CommandFactory};
use clap_complete::Shell;
use clap_mangen::Man;
use std::error::Error;
use std::fs;
use std::path::Path;
use std::process::ExitCode;

/// Names of the directories for shell completions, each with its shell.
const SHELLS: [(&str, Shell); 3] = [
    ("bash", Shell::Bash),
    ("zsh", Shell::Zsh),
    ("fish", Shell::Fish),
];

fn programs() -> [Command; 4] {
    [
        tmemd::config::arguments::Arguments::command(),
        tmemctl::command(),
        tmem_libvirt::Arguments::command(),
        tmem_exporter::Arguments::command(),
    ]
}

fn main() -> ExitCode {
    let Some(output) = std::env::args_os().nth(1) else {
        eprintln!("usage: tmem-manual DIRECTORY; it gets man/, bash/, zsh/ and fish/");
        return ExitCode::from(2);
    };
    match write(Path::new(&output)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("tmem-manual: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Writes all man pages and shell completions below the directory `output`.
fn write(output: &Path) -> Result<(), Box<dyn Error>> {
    let man = output.join("man");
    fs::create_dir_all(&man)?;
    for program in programs() {
        for (folder, shell) in SHELLS {
            let folder = output.join(folder);
            fs::create_dir_all(&folder)?;
            let name = program.get_name().to_owned();
            clap_complete::generate_to(shell, &mut program.clone(), name, folder)?;
        }
        let mut command = program.disable_help_subcommand(true);
        command.build();
        write_pages(&command, &man)?;
    }
    Ok(())
}

/// Writes the man pages of a command and of its subcommands, in section 8.
fn write_pages(command: &Command, folder: &Path) -> Result<(), Box<dyn Error>> {
    for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
        write_pages(sub, folder)?;
    }
    let name = command.get_display_name().unwrap_or(command.get_name());
    let mut text = Vec::new();
    Man::new(command.clone())
        .title(name.to_uppercase())
        .section("8")
        .manual("virtio-tmem")
        .render(&mut text)?;
    Ok(fs::write(folder.join(format!("{name}.8")), text)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that a command, its options and its subcommands have help texts.
    fn check(command: &Command) {
        let name = command.get_name();
        assert!(command.get_about().is_some(), "{name} has no help text");
        for option in command.get_arguments() {
            let id = option.get_id();
            assert!(option.get_help().is_some(), "{name} {id} has no help text");
        }
        command.get_subcommands().for_each(check);
    }

    #[test]
    fn each_command_and_option_has_a_help_text() {
        for program in programs() {
            let mut program = program.disable_help_subcommand(true);
            program.build();
            check(&program);
        }
    }
}
