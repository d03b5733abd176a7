// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Pages as guests have them in their page caches: of programs, texts, scripts, data and archives,
//! taken from the files of this machine.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use tmem_pool::{PAGE_SIZE, Page};

/// Where a machine has files worth caching.
const PLACES: [&str; 5] = ["/usr/bin", "/usr/lib", "/usr/share", "/var/lib", "/var/log"];

/// Of one file: a large one must not be the whole corpus.
const PAGES_PER_FILE_MAX: usize = 512;

/// Files that are looked at.
const FILES_MAX: usize = 200_000;

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

fn read(path: &Path, pages: &mut Vec<Page>, left: usize) -> io::Result<()> {
    let mut file = File::open(path)?;
    for _ in 0..left.min(PAGES_PER_FILE_MAX) {
        let mut page = [0; PAGE_SIZE];
        let mut len = 0;
        while len < PAGE_SIZE {
            match file.read(&mut page[len..])? {
                0 => break,
                n => len += n,
            }
        }
        if len == 0 {
            break;
        }
        // The rest of a file's last page is zero, as in a page cache.
        pages.push(page);
    }
    Ok(())
}

/// Pages of files, in the files' order within each, files in a random one.
///
/// # Errors
/// There are not as many.
pub fn load(dir: Option<&Path>, nr_pages: usize, seed: u64) -> Result<Vec<Page>, String> {
    let mut paths = Vec::new();
    match dir {
        Some(dir) => files(dir, &mut paths),
        None => PLACES
            .iter()
            .for_each(|dir| files(Path::new(dir), &mut paths)),
    }
    fastrand::Rng::with_seed(seed).shuffle(&mut paths);
    let mut pages = Vec::with_capacity(nr_pages);
    for path in &paths {
        if pages.len() == nr_pages {
            break;
        }
        // What cannot be read is left out.
        let left = nr_pages - pages.len();
        let _ = read(path, &mut pages, left);
    }
    if pages.len() < nr_pages {
        return Err(format!(
            "{} pages were found in {} files, not {nr_pages}: ask for fewer with --pages, or name a \
             directory that has more with --corpus",
            pages.len(),
            paths.len()
        ));
    }
    Ok(pages)
}
