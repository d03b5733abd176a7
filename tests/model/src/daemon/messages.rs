// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Messages of a VMM to a device of a daemon in this process. The daemon's handlers get them as
//! calls instead of bytes from a socket.
//!
//! Out of scope: the order of the messages around a start, a pause or a migration, and the socket
//! ([`crate::FakeGuest`]).

use std::fs::File;
use std::os::fd::OwnedFd;

use rustix::event::{EventfdFlags, eventfd};
use tmemd::parts::Device;
use vhost::vhost_user::VhostUserBackendReqHandlerMut;
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserVringAddrFlags};

/// A virtqueue as the VMM sets it up.
pub struct RingSetup<'a> {
    /// Number of the queue.
    pub queue: usize,
    /// Number of descriptors of the virtqueue.
    pub size: u16,
    /// Ring index at which the device starts.
    pub base: u16,
    /// Addresses of the descriptor table, the used ring and the available ring, in the VMM's
    /// address space.
    pub addresses: [u64; 3],
    /// Eventfd through which the guest notifies the device.
    pub kick: &'a OwnedFd,
    /// Eventfd through which the device notifies the guest.
    pub call: &'a OwnedFd,
}

fn refused<T>(message: &str, result: vhost::vhost_user::Result<T>) -> Result<T, String> {
    result.map_err(|error| format!("{message}: {error}"))
}

/// Sets up a virtqueue, without enabling it. An error names the message that the device refused.
pub fn set_up_ring(device: &mut Device, ring: &RingSetup<'_>) -> Result<(), String> {
    let (number, flags) = (ring.queue as u32, VhostUserVringAddrFlags::empty());
    let file = |fd: &OwnedFd| -> Option<File> {
        let same = fd.try_clone().expect("cannot duplicate the descriptor");
        Some(same.into())
    };
    refused(
        "SET_VRING_NUM",
        device.set_vring_num(number, ring.size.into()),
    )?;
    refused(
        "SET_VRING_BASE",
        device.set_vring_base(number, ring.base.into()),
    )?;
    let [desc, used, avail] = ring.addresses;
    let set = device.set_vring_addr(number, flags, desc, used, avail, 0);
    refused("SET_VRING_ADDR", set)?;
    let set = device.set_vring_kick(ring.queue as u8, file(ring.kick));
    refused("SET_VRING_KICK", set)?;
    let set = device.set_vring_call(ring.queue as u8, file(ring.call));
    refused("SET_VRING_CALL", set)
}

/// Stops a virtqueue. Returns the ring index at which it continues later.
pub fn stop_ring(device: &mut Device, queue: usize) -> Result<u16, String> {
    let state = refused("GET_VRING_BASE", device.get_vring_base(queue as u32))?;
    // Read the base from the field `num`, because the library has no function for it.
    Ok({ state.num } as u16)
}

/// Returns the generation in the device's configuration.
pub fn generation(device: &mut Device) -> u64 {
    let bytes = device.get_config(0, 8, VhostUserConfigFlags::empty());
    let bytes = bytes.expect("the configuration does not contain the generation");
    u64::from_le_bytes(
        bytes
            .try_into()
            .expect("the generation does not have 8 bytes"),
    )
}

/// Creates eventfds for the kicks or the interrupts of `count` queues.
pub fn notifiers(count: usize) -> Vec<OwnedFd> {
    let flags = EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC;
    let fd = |_| eventfd(0, flags).expect("cannot create an eventfd");
    (0..count).map(fd).collect()
}
