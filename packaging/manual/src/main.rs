// SPDX-License-Identifier: Apache-2.0 OR MIT
//! tmem-manual: writes the man pages and shell completions of all programs, for packages.
//!
//! It generates them from the definitions of the command lines and from the pages in `docs/` only.
//!
//! | file | contents |
//! | --- | --- |
//! | `pages.rs` | list of the pages, and what each contains |
//! | `markdown.rs` | converts Markdown to roff |

mod markdown;
mod pages;

use clap::{Command, Parser};
use clap_complete::Shell;
use clap_mangen::Man;
use roff::{Roff, bold, roman};
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Writes the man pages and shell completions of virtio-tmem.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Directory with the Markdown pages
    #[arg(long, value_name = "PATH", default_value = "docs")]
    docs: PathBuf,
    /// Directory to write to; man/, bash/, zsh/ and fish/ are created in it
    output: PathBuf,
}

/// Names of the directories for shell completions, each with its shell.
const SHELLS: [(&str, Shell); 3] = [
    ("bash", Shell::Bash),
    ("zsh", Shell::Zsh),
    ("fish", Shell::Fish),
];

fn main() -> ExitCode {
    let Arguments { docs, output } = Arguments::parse();
    match write(&docs, &output) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("tmem-manual: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Writes all man pages and shell completions below the directory `output`.
fn write(docs: &Path, output: &Path) -> Result<(), Box<dyn Error>> {
    let man = output.join("man");
    fs::create_dir_all(&man)?;
    for program in pages::programs() {
        for (folder, shell) in SHELLS {
            let folder = output.join(folder);
            fs::create_dir_all(&folder)?;
            let mut command = program.command.clone();
            let name = command.get_name().to_owned();
            clap_complete::generate_to(shell, &mut command, name, folder)?;
        }
        let mut command = program
            .command
            .disable_help_subcommand(true)
            .subcommand_help_heading("COMMANDS")
            .subcommand_value_name("COMMAND");
        command.build();
        let mut more = Roff::new();
        for (source, heading) in program.sections {
            more.control("SH", [heading.to_uppercase().as_str()]);
            more.extend([markdown::section(&docs.join(source), heading)?]);
        }
        write_command(&command, &man, &more.render(), program.see_also)?;
    }
    for page in pages::documents() {
        let mut text = Roff::new();
        let title = page.name.to_uppercase();
        text.control(
            "TH",
            [&title, page.section, "", pages::SOURCE, pages::MANUAL],
        );
        text.control("SH", ["NAME"]);
        text.text([roman(format!("{} - {}", page.name, page.about))]);
        if !page.synopsis.is_empty() {
            text.control("SH", ["SYNOPSIS"]);
            text.text([bold(page.name), roman(format!(" {}", page.synopsis))]);
        }
        text.control("SH", ["DESCRIPTION"]);
        let source = docs.join(page.source);
        text.extend([match page.heading {
            Some(heading) => markdown::section(&source, heading)?,
            None => markdown::page(&source)?,
        }]);
        let text = text.render() + &see_also(page.see_also);
        fs::write(man.join(format!("{}.{}", page.name, page.section)), text)?;
    }
    Ok(())
}

/// Writes the man pages of a command and of its subcommands. `more` has further sections for the
/// page of the command itself, in roff.
fn write_command(
    command: &Command,
    folder: &Path,
    more: &str,
    also: &[&str],
) -> Result<(), Box<dyn Error>> {
    let name = command.get_display_name().unwrap_or(command.get_name());
    let of_subcommand = [&format!("{}(8)", command.get_name())[..]];
    for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
        write_command(sub, folder, "", &of_subcommand)?;
    }
    let man = Man::new(command.clone())
        .title(name.to_uppercase())
        .section(pages::OF_COMMANDS)
        .source(pages::SOURCE)
        .manual(pages::MANUAL);
    let mut text = Vec::new();
    man.render_title(&mut text)?;
    man.render_name_section(&mut text)?;
    man.render_synopsis_section(&mut text)?;
    man.render_description_section(&mut text)?;
    man.render_options_section(&mut text)?;
    if command.has_subcommands() {
        man.render_subcommands_section(&mut text)?;
    }
    if let Some(help) = command.get_after_help() {
        text.extend(after_help(&help.to_string()).bytes());
    }
    text.extend(more.bytes());
    text.extend(see_also(also).bytes());
    fs::write(folder.join(format!("{name}.{}", pages::OF_COMMANDS)), text)?;
    Ok(())
}

/// Converts the text that follows the help of a command to a section in roff. If the first line
/// ends with a colon, it becomes the heading of the section; otherwise the heading is NOTES. The
/// other lines become the section's text.
fn after_help(text: &str) -> String {
    let (heading, text) = text.split_once(":\n").unwrap_or(("Notes", text));
    let mut page = Roff::new();
    page.control("SH", [heading.to_uppercase().as_str()]);
    for line in text.lines() {
        match line.is_empty() {
            true => page.control("PP", []),
            false => page.text([roman(line)]),
        };
    }
    page.render()
}

/// Returns the section SEE ALSO in roff, which names other man pages.
fn see_also(pages: &[&str]) -> String {
    let mut text = Roff::new();
    if !pages.is_empty() {
        text.control("SH", ["SEE ALSO"]);
        text.text([roman(pages.join(", "))]);
    }
    text.render()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Calls `check` with each command and subcommand and its full name.
    fn visit(command: &Command, check: &mut dyn FnMut(&str, &Command)) {
        let name = command.get_bin_name().unwrap_or(command.get_name());
        check(name, command);
        for sub in command.get_subcommands() {
            visit(sub, check);
        }
    }

    /// Returns the names of commands and options without a help text.
    fn without_help(command: &Command) -> Vec<String> {
        let mut command = command.clone().disable_help_subcommand(true);
        command.build();
        let mut missing = Vec::new();
        visit(&command, &mut |name, command| {
            if command
                .get_about()
                .is_none_or(|about| about.to_string().is_empty())
            {
                missing.push(name.to_owned());
            }
            for option in command.get_arguments() {
                if option
                    .get_help()
                    .is_none_or(|help| help.to_string().is_empty())
                {
                    missing.push(format!("{name} {}", option.get_id()));
                }
            }
        });
        missing
    }

    #[test]
    fn each_command_and_option_has_a_help_text() {
        for program in pages::programs() {
            assert_eq!(without_help(&program.command), [""; 0]);
        }
    }

    #[test]
    fn the_help_check_finds_a_missing_text() {
        let bare = Command::new("a")
            .about("A.")
            .arg(clap::Arg::new("silent").long("silent"))
            .subcommand(Command::new("b"));
        assert_eq!(without_help(&bare), ["a silent", "a b"]);
    }
}
