// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of the driver's side of a virtqueue ([`tmem_model::DriverRing`]) against an independent
//! device side in the same process: rust-vmm's virtio-queue.

use std::io::Read;
use std::sync::Arc;

use tmem_model::memory::PAGE_BYTES;
use tmem_model::requests::cut;
use tmem_model::ring::{RingFull, RingLayout};
use tmem_model::{Cut, DriverRing, GuestRam, RamRegion, RingError};
use virtio_queue::{Queue, QueueT};

struct Pair {
    ram: Arc<GuestRam>,
    driver: DriverRing,
    device: Queue,
}

fn pair(size: u16, event_idx: bool) -> Pair {
    let ram = GuestRam::new(
        &[RamRegion {
            start: 0,
            size_bytes: 4 << 20,
        }],
        true,
    )
    .unwrap();
    let layout = RingLayout::alloc(&ram, size);
    let mut driver = DriverRing::new(ram.clone(), layout);
    driver.set_event_idx(event_idx);
    let mut device = Queue::new(size).unwrap();
    device.set_size(size);
    let halves = |a: u64| (Some(a as u32), Some((a >> 32) as u32));
    let (low, high) = halves(layout.desc);
    device.set_desc_table_address(low, high);
    let (low, high) = halves(layout.avail);
    device.set_avail_ring_address(low, high);
    let (low, high) = halves(layout.used);
    device.set_used_ring_address(low, high);
    device.set_event_idx(event_idx);
    device.set_ready(true);
    assert!(device.is_valid(ram.map()));
    Pair {
        ram,
        driver,
        device,
    }
}

/// Sends random chains, direct and indirect, through many rounds of the ring. The device must get
/// each chain unchanged, and its answers must arrive in order.
#[test]
fn descriptor_chains_arrive_complete_and_in_order() {
    for event_idx in [false, true] {
        let Pair {
            ram,
            mut driver,
            mut device,
        } = pair(16, event_idx);
        let area = ram.alloc(16);
        let tables: Vec<u64> = (0..16).map(|_| ram.alloc(1)).collect();
        let mut rng = fastrand::Rng::with_seed(7);
        let (mut sent, mut answered) = (0u64, 0u64);
        for _ in 0..5000 {
            if rng.bool() {
                let bytes = rng.usize(1..=300);
                let at = area + rng.u64(..PAGE_BYTES);
                let data: Vec<u8> = (0..bytes).map(|_| sent as u8).collect();
                // All chains use the same memory, although several are in flight. The test reads
                // each chain as soon as it is published, before the next chain overwrites the
                // memory.
                ram.write(at, &data);
                let how = Cut::Random { seed: sent, max: 6 };
                let buffers = cut(&[(at, bytes, false), (area + 8192, 8, true)], how);
                let table = rng.bool().then(|| tables[(sent % 16) as usize]);
                match driver.add(&buffers, table, sent) {
                    Ok(()) => {
                        sent += 1;
                        let _ = driver.publish();
                        let chain = device
                            .pop_descriptor_chain(ram.map())
                            .expect("the device does not find the published chain");
                        let mut reader = chain.clone().reader(ram.map()).unwrap();
                        let mut got = Vec::new();
                        reader.read_to_end(&mut got).unwrap();
                        assert_eq!(got, data);
                        let writer = chain.clone().writer(ram.map()).unwrap();
                        assert_eq!(writer.available_bytes(), 8);
                        device.add_used(ram.map(), chain.head_index(), 8).unwrap();
                    }
                    Err(RingFull) => assert!(driver.free_descs() < 7),
                }
            } else {
                while let Some(used) = driver.pop_used().unwrap() {
                    assert_eq!((used.token, used.len), (answered, 8));
                    answered += 1;
                }
            }
        }
        while driver.pop_used().unwrap().is_some() {
            answered += 1;
        }
        assert!(sent > 1000 && sent == answered);
        assert_eq!((driver.in_flight(), driver.free_descs()), (0, 16));
    }
}

/// The driver must kick a device that sleeps and must not kick one that polls. Interrupts from the
/// device to the driver follow the same rule.
#[test]
fn kicks_and_interrupts_are_sent_only_while_enabled() {
    for event_idx in [false, true] {
        let Pair {
            ram,
            mut driver,
            mut device,
        } = pair(16, event_idx);
        let buffers = cut(&[(ram.alloc(1), 64, false)], Cut::Whole);
        let send = |driver: &mut DriverRing| {
            driver.add(&buffers, None, 0).unwrap();
            driver.publish()
        };
        assert!(!device.enable_notification(ram.map()).unwrap());
        assert!(
            send(&mut driver),
            "the driver does not kick a device that sleeps (event_idx {event_idx})"
        );
        device.disable_notification(ram.map()).unwrap();
        assert!(
            !send(&mut driver),
            "the driver kicks a device that polls (event_idx {event_idx})"
        );
        assert!(
            device.enable_notification(ram.map()).unwrap(),
            "the device did not find the chain published before it enabled notifications"
        );
        for _ in 0..2 {
            let head = device.pop_descriptor_chain(ram.map()).unwrap().head_index();
            device.add_used(ram.map(), head, 0).unwrap();
            assert!(device.needs_notification(ram.map()).unwrap());
            assert!(driver.pop_used().unwrap().is_some());
        }
        assert!(!device.enable_notification(ram.map()).unwrap());
        assert!(
            send(&mut driver),
            "the driver does not kick a device that sleeps again (event_idx {event_idx})"
        );
    }
}

/// Makes the device answer out of order, and answer a chain that is not in flight. The ring must
/// report each of these errors.
#[test]
fn a_device_that_answers_out_of_order_is_detected() {
    let Pair {
        ram,
        mut driver,
        mut device,
    } = pair(8, false);
    let buffers = cut(&[(ram.alloc(1), 64, false)], Cut::Whole);
    for token in 0..2 {
        driver.add(&buffers, None, token).unwrap();
    }
    let _ = driver.publish();
    let heads: Vec<u16> = (0..2)
        .map(|_| device.pop_descriptor_chain(ram.map()).unwrap().head_index())
        .collect();
    device.add_used(ram.map(), heads[1], 0).unwrap();
    let (expected, got) = (heads[0], u32::from(heads[1]));
    assert_eq!(
        driver.pop_used(),
        Err(RingError::OutOfOrder { expected, got })
    );

    let Pair {
        ram,
        mut driver,
        mut device,
    } = pair(8, false);
    device.add_used(ram.map(), 0, 0).unwrap();
    assert!(matches!(
        driver.pop_used(),
        Err(RingError::Unasked { in_flight: 0, .. })
    ));
}
