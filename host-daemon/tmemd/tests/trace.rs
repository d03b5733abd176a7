// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of the daemon's trace recorder. Its file contains the requests of guests in their order,
//! and nothing else.

use crate::common::Daemon;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use tmem_model::{Content, Driver, PutPage, Range, Request};
use tmem_trace::format::{Event, ObjectKey, Op, Reader};

/// Object number of the test's requests. It is unlikely to occur in a file by chance.
const OBJECT: u64 = 0x1357_9bdf_0246_8ace;
const INDEX: u64 = 0x0011_2233_4455;

fn recording(bytes_max: &str) -> Daemon {
    let vms = [("a", None), ("b", None)];
    Daemon::with_arguments(&vms, "64MiB", |directory| {
        let trace = directory.join("trace").to_str().unwrap().to_owned();
        ["--trace", &trace, "--trace-max", bytes_max]
            .map(String::from)
            .into()
    })
}

fn put(driver: &mut Driver, object: u64, index: u64, contents: &[Content]) {
    let page = |(content, index): (&Content, u64)| PutPage {
        object,
        index,
        cookie: 7,
        flags: 0,
        page: content.page(),
    };
    let put = Request::Put {
        pool: driver.pool(),
        pages: contents.iter().zip(index..).map(page).collect(),
    };
    let queue = driver.queue_of(object, index);
    assert!(driver.send(queue, put, contents.to_vec()));
    driver.settle().unwrap();
}

fn get(driver: &mut Driver, object: u64, index: u64, pages: usize) {
    let get = Request::Get {
        pool: driver.pool(),
        object,
        index,
        cookies: vec![7; pages],
        retain: 0,
    };
    let queue = driver.queue_of(object, index);
    assert!(driver.send(queue, get, vec![]));
    driver.settle().unwrap();
}

fn flush(driver: &mut Driver, object: u64, index: u64, nr_pages: u64) {
    let flush = Request::Flush {
        pool: driver.pool(),
        ranges: vec![Range {
            object,
            index,
            nr_pages,
        }],
    };
    let queue = driver.queue_of(object, index);
    assert!(driver.send(queue, flush, vec![]));
    driver.settle().unwrap();
}

fn read(bytes: &[u8]) -> Vec<Event> {
    Reader::new(bytes).unwrap().map(Result::unwrap).collect()
}

#[test]
fn a_trace_contains_the_requests_of_guests() {
    let mut daemon = recording("1MiB");
    let mut driver = daemon.driver("b", 1);
    let contents = [Content::Noise(1), Content::Noise(2), Content::SameFilled(0)];
    put(&mut driver, OBJECT, INDEX, &contents);
    get(&mut driver, OBJECT, INDEX + 1, 3);
    flush(&mut driver, OBJECT, INDEX, 2);
    flush(&mut driver, OBJECT, 0, virtio_tmem::TO_END);
    put(&mut driver, OBJECT + 1, INDEX, &contents[..1]);
    drop(driver);
    daemon.terminate();

    let path = daemon.path("trace");
    assert_eq!(
        fs::metadata(&path).unwrap().permissions().mode() & 0o777,
        0o600
    );
    let bytes = fs::read(&path).unwrap();
    let events = read(&bytes);
    assert!(events.is_sorted_by_key(|event| event.time_us));
    // Each connection empties the tenant when it begins and when it ends, and the trace records
    // that as Clear events. Such events come first, because `Daemon::spawn` connects to the socket
    // to test it.
    let mut ops = events.iter().filter(|event| event.tenant == 1);
    let mut ops = ops
        .by_ref()
        .map(|event| event.op)
        .skip_while(|op| *op == Op::Clear);
    let Some(Op::Put {
        object,
        page,
        size,
        workingset: false,
    }) = ops.next()
    else {
        panic!("the first operation after Clear is not the put: {events:?}");
    };
    assert_eq!(size.bytes(), 4096);
    let rest: Vec<Op> = ops.collect();
    let got = |page, hit| Op::Get { object, page, hit };
    assert!(matches!(rest[0], Op::Put { object: o, page: p, .. } if (o, p) == (object, page + 1)));
    assert!(matches!(rest[1], Op::Put { page: p, size, .. } if (p, size.bytes()) == (page + 2, 0)));
    assert_eq!(
        rest[2..5],
        [
            got(page + 1, true),
            got(page + 2, true),
            got(page + 3, false)
        ]
    );
    let nr_pages = Some(2);
    assert_eq!(
        rest[5..7],
        [
            Op::Flush {
                object,
                page,
                nr_pages
            },
            Op::FlushObject(object)
        ]
    );
    assert!(matches!(rest[7], Op::Put { object: o, .. } if o != object && o.pool == object.pool));
    assert!(
        rest[8..].iter().all(|op| *op == Op::Clear) && rest.len() > 8,
        "the trace does not end with Clear operations only: {rest:?}"
    );

    // The trace must contain neither object numbers and page numbers of the guest nor contents of
    // pages.
    assert_ne!(object, ObjectKey::default());
    for secret in [
        &OBJECT.to_le_bytes()[..5],
        &INDEX.to_le_bytes()[..5],
        &contents[0].page()[..8],
    ] {
        assert!(!bytes.windows(secret.len()).any(|window| window == secret));
    }
}

#[test]
fn a_trace_ends_at_its_maximum_size() {
    let mut daemon = recording("1000B");
    let mut driver = daemon.driver("a", 1);
    for index in 1..=100 {
        put(
            &mut driver,
            index * index,
            index * 9,
            &[Content::SameFilled(1), Content::SameFilled(1)],
        );
    }
    drop(driver);
    daemon.terminate();
    let bytes = fs::read(daemon.path("trace")).unwrap();
    assert!(
        (900..=1000).contains(&bytes.len()),
        "the trace has {} bytes, not 900 to its maximum of 1000",
        bytes.len()
    );
    assert!(read(&bytes).len() > 50);
}

#[test]
fn an_existing_file_is_not_overwritten_by_a_trace() {
    let directory = tempfile::tempdir().unwrap();
    let trace = directory.path().join("trace");
    fs::write(&trace, "mine").unwrap();
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_tmemd"));
    command
        .args(["--pool-size", "64MiB", "--control"])
        .arg(directory.path().join("control"));
    let output = command.arg("--trace").arg(&trace).output().unwrap();
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        !output.status.success() && log.contains(trace.to_str().unwrap()),
        "tmemd started although the trace exists, or its error does not name the trace: {log}"
    );
    assert_eq!(fs::read(&trace).unwrap(), b"mine");
}
