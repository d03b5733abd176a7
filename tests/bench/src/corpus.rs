// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Corpus of test pages that resemble the pages in guests' page caches. The benchmarks read them
//! from the files of this machine: programs, scripts, texts, databases, logs and archives.

use crate::bare;
use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use tmem_pool::{PAGE_SIZE, Page, PageHash};

/// Directories whose files supply the test pages.
const PLACES: [&str; 6] = [
    "/usr/bin",
    "/usr/lib",
    "/usr/share",
    "/usr/include",
    "/var/lib",
    "/var/log",
];

/// Largest number of test pages of one file, so that a large file does not dominate the corpus.
const PAGES_PER_FILE_MAX: usize = 512;

/// Largest number of files that the search for test pages collects.
const FILES_MAX: usize = 200_000;

/// Kinds of files, and the wanted share of each in percent of the pages. If a machine has too few
/// pages of one kind, pages of other kinds replace them.
const CLASSES: [(&str, usize); 7] = [
    ("ELF", 40),
    ("Python", 10),
    ("text", 20),
    ("data base", 10),
    ("log", 5),
    ("compressed", 8),
    ("other", 7),
];

/// First bytes of files whose format is already compressed, such as gzip, xz and PNG.
const COMPRESSED: [&[u8]; 9] = [
    b"\x1f\x8b",
    b"\xfd7zXZ",
    b"\x28\xb5\x2f\xfd",
    b"BZh",
    b"PK\x03\x04",
    b"\x89PNG",
    b"\xff\xd8\xff",
    b"!<arch>\ndebian",
    b"wOF2",
];

/// Returns the position in [`CLASSES`] of a file's kind. The kind follows from the file's name and
/// first page.
fn class(path: &Path, page: &Page) -> usize {
    let extension = path.extension().and_then(|e| e.to_str()).unwrap_or("");
    let text = || page.iter().all(|byte| *byte == 0 || *byte >= 9);
    let name = if page.starts_with(b"\x7fELF") {
        "ELF"
    } else if page.starts_with(b"SQLite format 3")
        || matches!(extension, "ibd" | "db" | "sqlite" | "bdb")
    {
        "data base"
    } else if COMPRESSED.iter().any(|magic| page.starts_with(magic)) {
        "compressed"
    } else if extension == "log" || path.starts_with("/var/log") {
        "log"
    } else if matches!(extension, "py" | "pyc") {
        "Python"
    } else if text() {
        "text"
    } else {
        "other"
    };
    let class = CLASSES.iter().position(|(other, _)| *other == name);
    class.expect("CLASSES does not list the class of a corpus file")
}

fn files(dir: &Path, found: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(dir) else {
        return;
    };
    let mut entries: Vec<_> = entries.flatten().collect();
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        if found.len() >= FILES_MAX {
            return;
        }
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => files(&entry.path(), found),
            Ok(kind) if kind.is_file() => found.push(entry.path()),
            _ => {}
        }
    }
}

/// Calls `page` with each of the first `pages_max` pages of a file. Bytes beyond the end of the
/// file are zero, as in a page cache.
fn read(path: &Path, pages_max: usize, mut page: impl FnMut(&Page)) -> io::Result<()> {
    let mut file = File::open(path)?;
    for _ in 0..pages_max {
        let mut buffer = [0; PAGE_SIZE];
        let mut len = 0;
        while len < PAGE_SIZE {
            match file.read(&mut buffer[len..])? {
                0 => break,
                n => len += n,
            }
        }
        if len == 0 {
            break;
        }
        page(&buffer);
    }
    Ok(())
}

/// Set of test pages. No two pages are equal, and no page consists of one repeated byte.
pub struct Corpus {
    pub pages: Vec<Box<Page>>,
    /// Names of the kinds of files, each with its number of pages.
    pub classes: Vec<(&'static str, usize)>,
}

/// Loads `nr_pages` test pages from the files below `dir`, or below [`PLACES`] with None. Uses the
/// files in random order. Consecutive pages of a file stay in their order. Leaves out files that
/// cannot be read.
///
/// # Errors
/// The files have fewer than `nr_pages` different pages.
pub fn load(dir: Option<&Path>, nr_pages: usize, seed: u64) -> Result<Corpus, String> {
    let mut paths = Vec::new();
    match dir {
        Some(dir) => files(dir, &mut paths),
        None => PLACES
            .iter()
            .for_each(|dir| files(Path::new(dir), &mut paths)),
    }
    fastrand::Rng::with_seed(seed).shuffle(&mut paths);
    let wanted = CLASSES.map(|(_, percent)| nr_pages * percent / 100);
    let mut had = [0; CLASSES.len()];
    let (mut pages, mut more) = (Vec::with_capacity(nr_pages), Vec::new());
    let (mut seen, hash) = (HashSet::new(), PageHash::new(seed));
    let found = paths.len();
    for path in paths {
        if pages.len() + more.len() >= 2 * nr_pages {
            break;
        }
        let mut kind = None;
        let _ = read(&path, PAGES_PER_FILE_MAX, |page| {
            let kind = *kind.get_or_insert_with(|| class(&path, page));
            if bare::same_filled(page) || !seen.insert(hash.of(page)) {
                return;
            }
            if had[kind] < wanted[kind] {
                had[kind] += 1;
                pages.push(Box::new(*page));
            } else if more.len() < nr_pages {
                more.push((kind, Box::new(*page)));
            }
        });
    }
    for (kind, page) in more {
        if pages.len() == nr_pages {
            break;
        }
        had[kind] += 1;
        pages.push(page);
    }
    if pages.len() < nr_pages {
        return Err(format!(
            "only {} different pages were found in {found} files, but {nr_pages} are wanted: ask for fewer \
             with --pages, or name a directory with more files with --corpus",
            pages.len(),
        ));
    }
    let classes = CLASSES.iter().zip(had).map(|((name, _), had)| (*name, had));
    Ok(Corpus {
        pages,
        classes: classes.collect(),
    })
}
