// SPDX-License-Identifier: Apache-2.0 OR MIT
//! zram, the kernel's compressed block device, with lz4. The benchmark uses O_DIRECT, so that reads
//! and writes bypass the page cache.

use rustix::fs::OFlags;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use tmem_pool::{PAGE_SIZE, Page};

const DEVICE: &str = "/dev/zram0";
const SYS: &str = "/sys/block/zram0";

/// Page with the alignment that O_DIRECT needs.
#[repr(align(4096))]
struct Aligned(Page);

/// A zram device, which is reset when this object is dropped.
pub struct Zram {
    file: File,
    buffer: Box<Aligned>,
}

fn set(name: &str, value: &str) -> Result<(), String> {
    fs::write(format!("{SYS}/{name}"), value)
        .map_err(|error| format!("cannot write to {SYS}/{name}: {error}"))
}

impl Zram {
    /// Sets the zram device up for `pages` pages, if no other program uses it.
    ///
    /// # Errors
    /// zram cannot be used. The error gives the reason.
    pub fn new(pages: usize) -> Result<Zram, String> {
        if !rustix::process::geteuid().is_root() {
            return Err("only root can measure zram".into());
        }
        let used = fs::read_to_string(format!("{SYS}/initstate")).map_err(|error| {
            format!("there is no zram device; run `modprobe zram` ({SYS}/initstate: {error})")
        })?;
        if used.trim() != "0" {
            return Err(format!("{DEVICE} is in use"));
        }
        set("comp_algorithm", "lz4")?;
        set("disksize", &(pages * PAGE_SIZE).to_string())?;
        let flags = OFlags::DIRECT.bits() as i32;
        let opened = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(flags)
            .open(DEVICE);
        match opened {
            Ok(file) => Ok(Zram {
                file,
                buffer: Box::new(Aligned([0; PAGE_SIZE])),
            }),
            Err(error) => {
                // Ignore errors of the reset, because the caller gets the original error.
                let _ = set("reset", "1");
                Err(format!("cannot open {DEVICE}: {error}"))
            }
        }
    }

    /// Writes a page to page number `at` of the device. Like a put, the call copies the page from
    /// memory that is not in the processor's caches.
    ///
    /// # Errors
    /// The device fails.
    pub fn write(&mut self, at: usize, page: &Page) -> Result<(), String> {
        self.buffer.0 = *page;
        let result = self
            .file
            .write_all_at(&self.buffer.0, (at * PAGE_SIZE) as u64);
        result.map_err(|error| format!("{DEVICE}: {error}"))
    }

    /// Reads page number `at` of the device.
    ///
    /// # Errors
    /// The device fails.
    pub fn read(&mut self, at: usize) -> Result<(), String> {
        let result = self
            .file
            .read_exact_at(&mut self.buffer.0, (at * PAGE_SIZE) as u64);
        result.map_err(|error| format!("{DEVICE}: {error}"))
    }
}

impl Drop for Zram {
    fn drop(&mut self) {
        // Close the device file by replacing it with /dev/null, because the device cannot be reset
        // while it is open.
        if let Ok(null) = File::open("/dev/null") {
            drop(std::mem::replace(&mut self.file, null));
        }
        if let Err(error) = set("reset", "1") {
            eprintln!("tmem-bench: {error}");
        }
    }
}
