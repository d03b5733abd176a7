// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of the index: random operations compared with a model, which consists of maps of the
//! standard library.

use super::*;
use crate::index::entry::Content;
use crate::tests::rng::{Rng, for_each_seed};
use std::collections::BTreeSet;

const KEYS_MAX: u32 = 400;

#[derive(Default)]
struct Model {
    pools: BTreeMap<u32, BTreeMap<(u64, u64), Id>>,
    detached: BTreeSet<Id>,
}

fn entry(rng: &mut Rng) -> Entry {
    let (cookie, check) = (rng.next(), rng.next() as u32);
    let content = match rng.below(3) {
        0 => Content::Same(check),
        1 => Content::Raw(check),
        _ => Content::Blob(check),
    };
    // Only a page that is stored in a blob can share its stored bytes with an equal page.
    let shared = rng.one_in(3) && matches!(content, Content::Blob(_));
    let stored_bytes = rng.below(4097) as usize;
    let mut entry = Entry::new(cookie, check, content, stored_bytes, shared);
    entry.set_retained(rng.one_in(3));
    entry
}

fn step(rng: &mut Rng, index: &mut Index, model: &mut Model) {
    let nr = rng.below(4) as u32;
    let object = rng.below(6) * 0x1_0000_0001;
    let page = rng.below(70) + if rng.one_in(4) { 1 << 50 } else { 0 };
    assert_eq!(index.pool(nr).is_some(), model.pools.contains_key(&nr));
    let Some(pool) = index.pool(nr) else {
        index.create_pool(nr, Sharing::Domain).unwrap();
        model.pools.insert(nr, BTreeMap::new());
        return;
    };
    assert!(index.is_live(pool));
    let pages = model.pools.get_mut(&nr).unwrap();
    let held = pages.get(&(object, page)).copied().unwrap_or(0);
    assert_eq!(index.find(pool, object, page), held);
    let range = pages.range((object, page)..=(object, u64::MAX));
    let next = range.map(|(&(_, page), &id)| (page, id)).next();
    assert_eq!(index.next(pool, object, page), next);
    match rng.below(100) {
        0 => {
            index.detach_pool(pool);
            assert!(!index.is_live(pool) && index.pool(nr).is_none());
            model
                .detached
                .extend(model.pools.remove(&nr).unwrap().into_values());
        }
        1 => {
            index.detach_all();
            for (_, pages) in std::mem::take(&mut model.pools) {
                model.detached.extend(pages.into_values());
            }
        }
        2..5 => {
            let whole = pages.range((object, 0)..=(object, u64::MAX));
            let whole: Vec<_> = whole.map(|(&key, &id)| (key, id)).collect();
            assert_eq!(index.object_pages(pool, object), whole.len() as u32);
            assert_eq!(index.detach_object(pool, object), whole.len() as u32);
            for (key, id) in whole {
                pages.remove(&key);
                model.detached.insert(id);
            }
        }
        5..20 => {
            if let Some(id) = index.any_detached(&mut 0, 1000) {
                assert!(model.detached.remove(&id));
                assert_eq!(index.key(id), None);
                index.remove(id);
            }
        }
        20..60 if held == 0 => {
            let entry = entry(rng);
            let full = index.entries.len() == KEYS_MAX;
            match index.insert(pool, object, page, entry) {
                Ok(id) => {
                    pages.insert((object, page), id);
                }
                Err(Full) => assert!(full),
            }
        }
        60..80 if held != 0 => index.change(held, |at| *at = entry(rng)),
        80..90 if held != 0 => {
            let key = Key {
                pool: nr,
                object,
                index: page,
            };
            assert_eq!(index.key(held), Some(key));
            index.remove(held);
            pages.remove(&(object, page));
        }
        _ => {
            // Remove a detached page, as an eviction does. The policy's queues still contain pages
            // that were dropped with their object or pool, and the policy does not know which pages
            // these are.
            if let Some(id) = model.detached.pop_last() {
                index.remove(id);
            }
        }
    }
}

#[test]
fn index_matches_a_nested_map_model() {
    for_each_seed("index_matches_a_nested_map_model", 20, |seed| {
        let mut rng = Rng::new(seed);
        let mut index = Index::new(seed, KEYS_MAX, &Chunks::some());
        let mut model = Model::default();
        for _ in 0..2000 {
            step(&mut rng, &mut index, &mut model);
            let mut ids = BTreeSet::new();
            index.check(|id, _, _| assert!(ids.insert(id)));
            let live = model.pools.values().flat_map(|pages| pages.values());
            assert_eq!(ids, live.chain(&model.detached).copied().collect());
            assert_eq!(index.detached.pages as usize, model.detached.len());
        }
        index.detach_all();
        while let Some(id) = index.any_detached(&mut 0, 1000) {
            index.remove(id);
        }
        assert_eq!((index.bytes(), index.has_detached()), (0, false));
    });
}

#[test]
fn index_memory_per_page_is_bounded() {
    let bytes_per_page = |objects: u64, pages: u64, apart: u64| {
        let mut index = Index::new(1, 1 << 22, &Chunks::some());
        index.create_pool(1, Sharing::Domain).unwrap();
        let pool = index.pool(1).unwrap();
        for object in 0..objects {
            for page in 0..pages {
                let entry = Entry::new(0, 0, Content::Same(0), 0, false);
                index.insert(pool, object, page * apart, entry).unwrap();
            }
        }
        index.bytes() as f64 / (objects * pages) as f64
    };
    for (name, objects, pages, apart, most) in [
        ("a large object", 1, 1 << 18, 1, 31.0),
        ("objects of 64 pages", 1 << 12, 64, 1, 33.0),
        ("objects of 4 pages", 1 << 16, 4, 1, 52.0),
        ("objects of one page", 1 << 18, 1, 1, 120.0),
        ("pages far apart", 1, 1 << 18, 1 << 20, 60.0),
    ] {
        let bytes = bytes_per_page(objects, pages, apart);
        println!("{name}: {bytes:.1} B a page");
        assert!(
            bytes < most,
            "{name}: the index takes {bytes:.1} B for each page, not less than {most} B"
        );
    }
}

#[test]
fn index_memory_shrinks_as_pages_of_each_leaf_are_removed() {
    let mut index = Index::new(1, 1 << 22, &Chunks::some());
    index.create_pool(1, Sharing::Domain).unwrap();
    let pool = index.pool(1).unwrap();
    let add = |page| {
        let entry = Entry::new(page, 0, Content::Same(0), 0, false);
        index.insert(pool, 1, page, entry).unwrap()
    };
    let ids: Vec<Id> = (0..1 << 16).map(add).collect();
    let full_bytes = index.bytes();
    for (page, &id) in (0..).zip(&ids).filter(|(page, _)| page % 16 != 5) {
        assert_eq!({ index.remove(id).cookie }, page);
    }
    // A leaf with one page takes 52 B and its part of a node, and a full leaf takes 472 B.
    assert!(
        index.bytes() * 5 < full_bytes,
        "the index still takes {} of {full_bytes} B after 15 of 16 pages were removed",
        index.bytes()
    );
    for page in (5..1 << 16).step_by(16) {
        let id = index.find(pool, 1, page);
        assert_eq!(id, ids[page as usize]);
        assert_eq!({ index.entries[id].cookie }, page);
    }
}

#[test]
fn object_map_shrinks_as_objects_are_removed() {
    const OBJECTS: u64 = 40_000;
    let mut index = Index::new(1, 1 << 22, &Chunks::some());
    index.create_pool(1, Sharing::Domain).unwrap();
    let pool = index.pool(1).unwrap();
    let add = |object| {
        let entry = Entry::new(object, 0, Content::Same(0), 0, false);
        index.insert(pool, object, 0, entry).unwrap()
    };
    let ids: Vec<Id> = (0..OBJECTS).map(add).collect();
    let full_bytes = index.map.bytes();
    for (object, &id) in (0..).zip(&ids).filter(|(object, _)| object % 20 != 0) {
        assert_eq!({ index.remove(id).cookie }, object);
    }
    assert!(
        index.map.bytes() * 4 < full_bytes,
        "the object map still takes {} of {full_bytes} B after 19 of 20 objects were removed",
        index.map.bytes()
    );
    index.check(|_, _, _| {});
    for object in (0..OBJECTS).filter(|object| object % 20 == 0) {
        assert_eq!(index.find(pool, object, 0), ids[object as usize]);
    }
}

/// Tests that a look-up never takes the record of a freed object for that object, although the
/// index remembers the object that it found last.
#[test]
fn finding_a_page_of_a_freed_object_fails() {
    let mut rng = Rng::new(3);
    let mut index = Index::new(3, KEYS_MAX, &Chunks::some());
    index.create_pool(1, Sharing::Domain).unwrap();
    let pool = index.pool(1).unwrap();
    // Keep a second object, so that the memory of the object records is not released.
    index.insert(pool, 8, 0, entry(&mut rng)).unwrap();
    for page in 0..3 {
        let id = index.insert(pool, 7, page, entry(&mut rng)).unwrap();
        assert_eq!(index.find(pool, 7, page), id);
        index.remove(id);
        assert_eq!(index.find(pool, 7, page), 0);
        let id = index.insert(pool, 7, page, entry(&mut rng)).unwrap();
        assert_eq!(index.find(pool, 7, page), id);
        index.check(|_, _, _| {});
        assert_eq!(index.detach_object(pool, 7), 1);
        assert_eq!(index.find(pool, 7, page), 0);
    }
}
