// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of single rules of SPEC.md. A test fails if the daemon violates the rule.

use crate::common::{Daemon, TIMEOUT, every_queue_answers, guest, work};
use tmem_model::{Content, Driver, GuestConfig, GuestError, Key, PutPage, Range, Request};
use virtio_tmem as wire;

fn put_one(driver: &mut Driver, object: u64, index: u64, cookie: u64, content: Content) {
    let pool = driver.pool();
    let page = PutPage {
        object,
        index,
        cookie,
        flags: 0,
        page: content.page(),
    };
    let queue = driver.queue_of(object, index);
    assert!(driver.send(
        queue,
        Request::Put {
            pool,
            pages: vec![page]
        },
        vec![content]
    ));
    driver.settle().unwrap();
    assert_eq!(
        driver.model.cookie(Key {
            pool,
            object,
            index
        }),
        Some(cookie),
        "the page that was put is not in the driver's model"
    );
}

/// Requests one page by its cookie. Returns true for a hit. The driver's model checks the content
/// of a returned page.
fn get_one(driver: &mut Driver, pool: u32, object: u64, index: u64, cookie: u64) -> bool {
    let hits = driver.model.counts().hits;
    let queue = driver.queue_of(object, index);
    let get = Request::Get {
        pool,
        object,
        index,
        cookies: vec![cookie],
        retain: 0,
    };
    assert!(driver.send(queue, get, vec![]));
    driver.settle().unwrap();
    driver.model.counts().hits > hits
}

/// The device's configuration has only values that SPEC.md allows, and the device offers no
/// reserved feature.
#[test]
fn device_configuration_and_features_match_the_specification() {
    let mut daemon = Daemon::start(&[("a", None)]);
    let driver = daemon.driver("a", 1);
    let config = driver.guest.device().unwrap();
    assert_eq!(config.page_size as usize, wire::PAGE_SIZE);
    assert_eq!(usize::from(config.batch_max), wire::BATCH_MAX);
    assert_eq!(config.pools_max as usize, wire::POOLS_MAX);
    assert!((1..=wire::REQUEST_QUEUES_MAX).contains(&usize::from(config.num_request_queues)));
    assert_eq!(config.reserved, [0; 3]);
    assert_ne!(config.generation, 0);
    let offered = driver.guest.offered_features();
    for bit in [wire::F_PERSISTENT, wire::F_SHARED, wire::F_EVENTS, 33, 34] {
        assert_eq!(
            offered & (1 << bit),
            0,
            "the device offers feature bit {bit}, which it must not offer"
        );
    }
    for bit in [wire::F_LATENCIES, wire::F_RETAIN, 26, 28, 29, 30, 32, 35] {
        assert_ne!(
            offered & (1 << bit),
            0,
            "the device does not offer feature bit {bit}"
        );
    }
}

/// The daemon stores all 64 bits of a page's cookie, and compares all of them at a get.
#[test]
fn a_get_whose_cookie_differs_in_one_bit_misses() {
    let mut daemon = Daemon::start(&[("a", None)]);
    let mut driver = daemon.driver("a", 1);
    let pool = driver.pool();
    let cookie = 0x0123_4567_89ab_cdef;
    for bit in 0..64 {
        put_one(&mut driver, 1, 1, cookie, Content::Noise(bit));
        assert!(
            !get_one(&mut driver, pool, 1, 1, cookie ^ (1 << bit)),
            "a get returned the page although bit {bit} of its cookie is wrong"
        );
        put_one(&mut driver, 1, 1, cookie ^ (1 << bit), Content::Text(bit));
        assert!(
            !get_one(&mut driver, pool, 1, 1, cookie),
            "a get returned the page although bit {bit} of its cookie is wrong: the get has the \
             cookie of the replaced page"
        );
    }
    for cookie in [1, u64::MAX, 1 << 63, 1 << 32] {
        put_one(&mut driver, 1, 1, cookie, Content::Noise(cookie));
        assert!(
            !get_one(&mut driver, pool, 1, 1, 0),
            "a get with cookie 0 returned the page"
        );
        put_one(&mut driver, 1, 1, cookie, Content::Noise(cookie));
        assert!(get_one(&mut driver, pool, 1, 1, cookie));
        assert!(
            !get_one(&mut driver, pool, 1, 1, cookie),
            "a second get returned a page that the first get had removed"
        );
    }
}

/// Keys that differ in one bit of the pool, the object or the index name different pages.
#[test]
fn keys_that_differ_in_one_bit_name_different_pages() {
    let mut daemon = Daemon::start(&[("a", None)]);
    let mut driver = daemon.driver("a", 1);
    let pool = driver.pool();
    put_one(&mut driver, 1 << 20, 1 << 20, 9, Content::Noise(1));
    for bit in 0..64 {
        assert!(!get_one(
            &mut driver,
            pool,
            (1 << 20) ^ (1 << bit) | 1,
            1 << 20,
            9
        ));
    }
    for bit in 0..wire::INDEX_BITS {
        assert!(!get_one(
            &mut driver,
            pool,
            1 << 20,
            (1 << 20) ^ (1 << bit),
            9
        ));
    }
    driver.create_pool().unwrap();
    assert!(!get_one(&mut driver, pool + 1, 1 << 20, 1 << 20, 9));
    assert!(get_one(&mut driver, pool, 1 << 20, 1 << 20, 9));
    // The page has the largest valid index, object number and cookie.
    let last = (1 << wire::INDEX_BITS) - 1;
    let pool = driver.pool();
    put_one(&mut driver, u64::MAX, last, u64::MAX, Content::Noise(2));
    assert!(get_one(&mut driver, pool, u64::MAX, last, u64::MAX));
}

/// If a PUT contains a key twice, the daemon stores the later page.
#[test]
fn a_get_returns_the_last_page_that_was_put_under_its_key() {
    let mut daemon = Daemon::start(&[("a", None)]);
    let mut driver = daemon.driver("a", 1);
    let pool = driver.pool();
    let contents: Vec<Content> = (0..64).map(Content::Noise).collect();
    let page = |i: u64| PutPage {
        object: 1,
        index: i % 8,
        cookie: 100 + i,
        flags: 0,
        page: contents[i as usize].page(),
    };
    let pages = (0..64).map(page).collect();
    let queue = driver.queue_of(1, 0);
    assert!(driver.send(queue, Request::Put { pool, pages }, contents.clone()));
    driver.settle().unwrap();
    for i in 0..8 {
        assert!(
            !get_one(&mut driver, pool, 1, i, 100 + i),
            "an earlier put of the same key was returned"
        );
    }
    let pages = (0..64).map(page).collect();
    assert!(driver.send(queue, Request::Put { pool, pages }, contents));
    for i in 0..8 {
        assert!(
            get_one(&mut driver, pool, 1, i, 100 + 56 + i),
            "the last put of the key was not returned"
        );
    }
}

/// The daemon answers the requests of one queue in their order, whether they are slow or fast. The
/// simulated guest reports any other order as an error.
#[test]
fn answers_are_published_in_the_order_of_requests() {
    let mut daemon = Daemon::start(&[("a", None)]);
    let config = GuestConfig {
        request_queues: 1,
        slots: 28,
        ..guest("a")
    };
    let mut driver = daemon.driver_with(config, Default::default());
    let pool = driver.pool();
    let page = |i: u64| PutPage {
        object: 1,
        index: i,
        cookie: 1 + i,
        flags: 0,
        page: Content::Noise(i).page(),
    };
    let put = Request::Put {
        pool,
        pages: (0..64).map(page).collect(),
    };
    let get = Request::Get {
        pool,
        object: 1,
        index: 0,
        cookies: (1..=64).collect(),
        retain: 0,
    };
    let quick = Request::Get {
        pool: 99,
        object: 1,
        index: 0,
        cookies: vec![1],
        retain: 0,
    };
    let flush = Request::Flush {
        pool,
        ranges: vec![Range {
            object: 2,
            index: 0,
            nr_pages: wire::TO_END,
        }],
    };
    let generation = driver.guest.generation();
    for _ in 0..20 {
        let mut tokens = Vec::new();
        for i in 0..28 {
            let request = [&put, &quick, &get, &flush][i % 4].clone();
            tokens.push(driver.guest.add(1, request, generation).unwrap());
        }
        driver.guest.publish(1);
        let done = driver.guest.drain(TIMEOUT).unwrap();
        assert_eq!(done.iter().map(|d| d.token).collect::<Vec<_>>(), tokens);
        // The daemon also executes the requests in their order. Each GET of 64 pages follows a PUT
        // of these pages, so all of its pages must be hits.
        for d in done.iter().skip(2).step_by(4) {
            assert!(d.answer.pages.iter().all(|a| a.result == wire::P_HIT));
        }
    }
}

/// A FLUSH request drops the pages in its ranges and no other page.
#[test]
fn flushes_drop_exactly_their_ranges() {
    let mut daemon = Daemon::start(&[("a", None)]);
    let mut driver = daemon.driver("a", 1);
    let pool = driver.pool();
    let flush = |driver: &mut Driver, object, index, nr_pages| {
        let queue = driver.queue_of(object, index);
        let ranges = vec![Range {
            object,
            index,
            nr_pages,
        }];
        assert!(driver.send(queue, Request::Flush { pool, ranges }, vec![]));
        driver.settle().unwrap();
    };
    let cases = [
        (10, 1, 10..11),
        (10, 5, 10..15),
        (0, 12, 0..12),
        (20, wire::TO_END, 20..32),
    ];
    for (index, nr_pages, dropped) in cases {
        for object in [1, 2] {
            for i in 0..32 {
                put_one(
                    &mut driver,
                    object,
                    i,
                    500 + i,
                    Content::Text(object * 100 + i),
                );
            }
        }
        flush(&mut driver, 1, index, nr_pages);
        for i in 0..32 {
            assert_eq!(
                get_one(&mut driver, pool, 1, i, 500 + i),
                !dropped.contains(&i),
                "the flush must drop exactly the pages of its ranges; page {i} is wrong"
            );
            assert!(
                get_one(&mut driver, pool, 2, i, 500 + i),
                "the flush dropped a page of another object"
            );
        }
    }
    let end = 1 << wire::INDEX_BITS;
    put_one(&mut driver, 3, end - 1, 5, Content::Noise(3));
    flush(&mut driver, 3, 1, end - 1);
    assert!(!get_one(&mut driver, pool, 3, end - 1, 5));
}

/// A VM can have 256 pools, but not more. The guest's driver chooses their ids. If the driver
/// destroys a pool and creates it again, the pool is empty.
#[test]
fn the_number_of_pools_is_limited() {
    let mut daemon = Daemon::start(&[("a", None), ("b", None)]);
    let mut driver = daemon.driver("a", 1);
    let mut other = daemon.driver("b", 2);
    let create = |driver: &mut Driver, pool: u32| {
        // Private pools count as others do.
        let flags = pool % 2 * wire::POOL_PRIVATE;
        assert!(driver.send(0, Request::PoolCreate { pool, flags }, vec![]));
        driver.settle().unwrap();
        driver.model.pools().contains(&pool)
    };
    // The driver's model checks the status of each answer.
    assert!(create(&mut driver, u32::MAX));
    for i in 0..254 {
        assert!(create(&mut driver, 1000 + i * 7919));
    }
    assert_eq!(driver.model.pools().len(), wire::POOLS_MAX);
    assert!(
        !create(&mut driver, 5),
        "a pool beyond the limit was created"
    );
    create(&mut driver, u32::MAX);
    assert!(
        create(&mut other, 5),
        "a VM could not create a pool because another VM has the maximum of pools"
    );
    put_one(&mut driver, 1, 1, 7, Content::Noise(7));
    let pool = driver.pool();
    assert!(driver.send(0, Request::PoolDestroy { pool }, vec![]));
    driver.settle().unwrap();
    assert!(
        !get_one(&mut driver, pool, 1, 1, 7),
        "a destroyed pool returned a page"
    );
    assert!(
        create(&mut driver, 5),
        "no pool can be created after one was destroyed"
    );
    driver.send(0, Request::PoolDestroy { pool: 5 }, vec![]);
    driver.settle().unwrap();
    assert!(create(&mut driver, pool));
    assert!(
        !get_one(&mut driver, pool, 1, 1, 7),
        "a new pool with an old id returned a page"
    );
    every_queue_answers(&mut driver);
}

/// Two VMs of one trust domain use equal pool ids, object numbers, cookies and contents. Still,
/// neither VM gets a page of the other.
#[test]
fn a_get_never_returns_a_page_of_another_vm() {
    let mut daemon = Daemon::start(&[("a", Some("team")), ("b", Some("team"))]);
    let mut a = daemon.driver("a", 1);
    let mut b = daemon.driver("b", 1);
    let pool = a.pool();
    assert_eq!(pool, b.pool());
    for i in 0..32 {
        put_one(&mut a, 1, i, 50 + i, Content::Text(i));
        assert!(
            !get_one(&mut b, pool, 1, i, 50 + i),
            "the daemon returned the page of another VM"
        );
        put_one(&mut b, 1, i, 50 + i, Content::Text(i));
    }
    // The daemon answers a request that has the generation number of another VM with STALE.
    let get = Request::Get {
        pool,
        object: 1,
        index: 0,
        cookies: vec![50],
        retain: 0,
    };
    let generation = a.guest.generation();
    assert_ne!(generation, b.guest.generation());
    b.guest.add(1, get, generation).unwrap();
    b.guest.publish(1);
    assert_eq!(
        b.guest.drain(TIMEOUT).unwrap()[0].answer.status,
        wire::S_STALE
    );
    // A flush, the destruction of a pool and a reset drop only pages of the VM itself.
    let ranges = vec![Range {
        object: 1,
        index: 0,
        nr_pages: wire::TO_END,
    }];
    let queue = b.queue_of(1, 0);
    b.send(queue, Request::Flush { pool, ranges }, vec![]);
    b.settle().unwrap();
    b.send(0, Request::PoolDestroy { pool }, vec![]);
    b.settle().unwrap();
    b.reboot().unwrap();
    for i in 0..32 {
        assert!(
            get_one(&mut a, pool, 1, i, 50 + i),
            "page {i} was dropped with a pool of another VM"
        );
    }
    // A VM cannot use a pool that only another VM has.
    for _ in 0..2 {
        a.create_pool().unwrap();
    }
    let pool = a.pool();
    put_one(&mut a, 1, 1, 3, Content::Noise(3));
    assert!(!b.model.pools().contains(&pool));
    assert!(
        !get_one(&mut b, pool, 1, 1, 3),
        "the daemon returned a page of a pool that only another VM has"
    );
}

/// The daemon serves one connection at a time on each VM's socket.
#[test]
fn a_second_connection_of_a_vm_is_refused() {
    let mut daemon = Daemon::start(&[("a", None)]);
    let mut first = daemon.driver("a", 1);
    for i in 0..5 {
        let mut second = Driver::new(guest("a"), Default::default()).unwrap();
        let error = second.guest.connect(&daemon.socket("a"));
        assert!(
            matches!(error, Err(GuestError::Message { .. })),
            "attempt {i}: the second connection did not fail at a vhost-user message: {error:?}"
        );
        work(&mut first, 30);
    }
    first.get_all().unwrap();
    first.hang_up().unwrap();
    let mut next = daemon.driver("a", 2);
    work(&mut next, 30);
}

/// The daemon refuses guest memory that another process could truncate, because it is not sealed.
#[test]
fn guest_memory_that_can_be_truncated_is_refused() {
    let mut daemon = Daemon::start(&[("a", None), ("b", None)]);
    let mut neighbour = daemon.driver("b", 2);
    for mem_slots in [false, true] {
        let config = GuestConfig {
            sealed: false,
            mem_slots,
            ..guest("a")
        };
        let mut driver = Driver::new(config, Default::default()).unwrap();
        let socket = daemon.socket("a");
        let unsealed = &mut driver.guest;
        daemon.until("the VM's socket is free", || {
            unsealed.connect(&socket).is_ok()
        });
        let error = driver.guest.start();
        assert!(
            matches!(error, Err(GuestError::Message { .. })),
            "memory that can be truncated was not refused at a vhost-user message: {error:?}"
        );
        driver.guest.disconnect();
        work(&mut neighbour, 20);
    }
    let mut sealed = daemon.driver("a", 1);
    work(&mut sealed, 20);
}
