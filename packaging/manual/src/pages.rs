// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The man pages of all programs and file formats. The pages of programs come from the definitions
//! of their command lines, and other pages come from Markdown pages in `docs/`.

use clap::{Command, CommandFactory};

/// Manual section for the man pages of commands: 8, the section for administrators.
pub const OF_COMMANDS: &str = "8";
/// Manual section for the man pages of file formats.
const OF_FORMATS: &str = "5";
/// Name of the manual, which roff prints in the header of each page.
pub const MANUAL: &str = "virtio-tmem";
/// Name and version of the project, which roff prints in the footer of each page.
pub const SOURCE: &str = concat!("virtio-tmem ", env!("CARGO_PKG_VERSION"));

/// A program whose command line is defined with clap.
pub struct Program {
    /// Definition of the program's command line.
    pub command: Command,
    /// Further sections of the program's man page. Each is a file in `docs/` and the heading of a
    /// section in that file.
    pub sections: &'static [(&'static str, &'static str)],
    /// Names of the man pages that the section SEE ALSO lists.
    pub see_also: &'static [&'static str],
}

/// A man page made of a Markdown page in `docs/`.
pub struct Document {
    /// Name of the man page.
    pub name: &'static str,
    /// Number of the manual section to which the page belongs.
    pub section: &'static str,
    /// Description of the subject in a few words, for the section NAME.
    pub about: &'static str,
    /// Arguments of the program, for the section SYNOPSIS; empty for a file format.
    pub synopsis: &'static str,
    /// File in `docs/` from which the man page is made.
    pub source: &'static str,
    /// Heading of the section of the file that the man page contains; None for the complete file.
    pub heading: Option<&'static str>,
    /// Names of the man pages that the section SEE ALSO lists.
    pub see_also: &'static [&'static str],
}

/// Returns the programs whose command lines are defined with clap.
pub fn programs() -> [Program; 4] {
    [
        Program {
            command: tmemd::config::arguments::Arguments::command(),
            sections: &[("configuration.md", "Logs")],
            see_also: &["tmemd.toml(5)", "tmemctl(8)", "tmem-libvirt(8)"],
        },
        Program {
            command: tmemctl::command(),
            sections: &[],
            see_also: &["tmemd(8)", "tmemd.toml(5)", "tmem-cache(5)", "virsh(1)"],
        },
        Program {
            command: tmem_libvirt::Arguments::command(),
            sections: &[("libvirt.md", "The bridge")],
            see_also: &["tmemd(8)", "tmem-hook(8)", "tmem-cache(5)"],
        },
        Program {
            command: tmem_exporter::Arguments::command(),
            sections: &[("metrics.md", "Access"), ("metrics.md", "TLS")],
            see_also: &["tmemd(8)", "tmemctl(8)"],
        },
    ]
}

/// Returns the man pages that are made of Markdown pages in `docs/`.
pub fn documents() -> [Document; 4] {
    [
        Document {
            name: "tmemd.toml",
            section: OF_FORMATS,
            about: "configuration file of the virtio-tmem host daemon",
            synopsis: "",
            source: "configuration.md",
            heading: None,
            see_also: &["tmemd(8)", "tmemctl(8)"],
        },
        Document {
            name: "tmem-cache",
            section: OF_FORMATS,
            about: "quota of a VM in the metadata of its libvirt domain",
            synopsis: "",
            source: "libvirt.md",
            heading: Some("The quota"),
            see_also: &["tmemctl-attach(8)", "tmemctl-quota(8)", "tmem-libvirt(8)"],
        },
        Document {
            name: "tmem-trace",
            section: OF_FORMATS,
            about: "record of the requests of guests to the pool",
            synopsis: "",
            source: "traces.md",
            heading: None,
            see_also: &["tmemd(8)", "tmemctl-trace(8)"],
        },
        Document {
            name: "tmem-hook",
            section: OF_COMMANDS,
            about: "libvirt's hook for VMs with the virtio-tmem device",
            synopsis: "[--socket PATH] [--owner USER] [--late-file PATH] DOMAIN OPERATION ...",
            source: "libvirt.md",
            heading: Some("The hook"),
            see_also: &["tmemd(8)", "tmem-libvirt(8)", "tmemctl-attach(8)"],
        },
    ]
}
