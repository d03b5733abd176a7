// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Fills a daemon's pool through one VM's socket and then prints a line with the pool's statistics
//! five times a second: `fill SOCKET CONTROL MIB`. The program ends when the daemon does.
//!
//! Tests use the program to fill a pool before the host runs short of memory. In these tests the
//! host may be a VM itself.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};
use tmem_model::{Content, Driver, DriverConfig, GuestConfig, PutPage, Request};

/// Number of pages in a PUT request.
const BATCH: u64 = 64;

/// Time between two lines of output.
const PERIOD: Duration = Duration::from_millis(200);

/// Time limit for filling the pool. If the pool is not full by then, the program ends with an
/// error.
const FILL_MAX: Duration = Duration::from_secs(300);

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Returns the statistics of the pool.
fn stats(control: &Path) -> Result<serde_json::Value> {
    let mut stream = UnixStream::connect(control)?;
    stream.write_all(b"{\"method\":\"io.virtiotmem.Control.GetStats\",\"parameters\":{}}\0")?;
    let mut answer = Vec::new();
    BufReader::new(stream).read_until(0, &mut answer)?;
    answer.pop();
    let mut answer: serde_json::Value = serde_json::from_slice(&answer)?;
    Ok(answer["parameters"]["pool"].take())
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, socket, control, mib] = &arguments[..] else {
        return Err("usage: fill SOCKET CONTROL MIB".into());
    };
    let (control, wanted) = (Path::new(control), mib.parse::<u64>()? << 20);
    let mut driver = Driver::new(GuestConfig::default(), DriverConfig::default())?;
    driver
        .connect(Path::new(socket))
        .map_err(|e| format!("{socket}: {e:?}"))?;
    let begun = Instant::now();
    // The loop ends when the pool holds enough pages. The number of puts is not known before,
    // because the daemon refuses puts while too many pages wait to be finalized.
    for start in (0..).step_by(BATCH as usize) {
        let contents: Vec<Content> = (start..start + BATCH).map(Content::Noise).collect();
        let pages = contents
            .iter()
            .zip(start..)
            .map(|(content, index)| PutPage {
                object: 1,
                index,
                cookie: index + 1,
                flags: 0,
                page: content.page(),
            });
        let (pool, pages) = (driver.pool(), pages.collect());
        let queue = driver.queue_of(1, start);
        driver.send(queue, Request::Put { pool, pages }, contents);
        driver.settle().map_err(|e| format!("{e:?}"))?;
        let full =
            start % (16 * BATCH) == 0 && stats(control)?["payload_bytes"].as_u64() >= Some(wanted);
        if full {
            break;
        }
        if begun.elapsed() > FILL_MAX {
            return Err(format!("the pool did not fill: {}", stats(control)?).into());
        }
    }
    loop {
        println!("{}", stats(control)?);
        std::thread::sleep(PERIOD);
    }
}
