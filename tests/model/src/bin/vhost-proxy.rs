// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A vhost-user proxy for tests, between the front end of a guest that cannot reconnect (user-mode
//! Linux) and tmemd.
//!
//! It behaves as a VMM that forwards everything, such as Cloud Hypervisor's `--generic-vhost-user`: it
//! passes memory and eventfds to tmemd, outlives it, and connects again every 100 ms. It forwards
//! configuration reads while the driver probes the device. When the file SOCKET.probed exists, it
//! counts and fails each of them, because in such VMMs a read without a back end ends the VM. It
//! writes its counts as a line of JSON to its standard output after each change, and ends when the
//! front end does.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::sleep;
use std::time::{Duration, Instant};
use vhost::vhost_user::message::*;
use vhost::vhost_user::{
    BackendReqHandler, Error, Frontend, GpuBackend, Result, VhostUserBackendReqHandlerMut,
    VhostUserFrontend,
};
use vhost::{VhostBackend, VhostUserMemoryRegionBase, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;

/// Pause between two attempts to connect to tmemd, as in Cloud Hypervisor.
const RECONNECT: Duration = Duration::from_millis(100);
/// Longest time that tmemd may take to answer a message. It is shorter than the time for which tests
/// stop tmemd.
const ANSWER: Duration = Duration::from_secs(2);
/// Longest time that the front end waits for the first connection to tmemd.
const FIRST_CONNECTION: Duration = Duration::from_secs(20);

/// Protocol features that the proxy offers, if tmemd has them. It offers no RESET_DEVICE.
const PROTOCOL_FEATURES: VhostUserProtocolFeatures = VhostUserProtocolFeatures::MQ
    .union(VhostUserProtocolFeatures::CONFIG)
    .union(VhostUserProtocolFeatures::REPLY_ACK);

/// Counts that the proxy reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    /// Whether tmemd is connected.
    connected: bool,
    /// Number of connections to tmemd that got all messages of a start.
    connections: u64,
    /// Number of connections that tmemd ended, or that failed.
    losses: u64,
    /// Number of configuration reads that the proxy forwarded.
    reads_forwarded: u64,
    /// Number of configuration reads after the probe, which the proxy failed.
    reads_failed: u64,
}

/// A ring as the front end has set it up.
#[derive(Default)]
struct Ring {
    size: Option<u32>,
    /// Addresses of descriptors, used ring and available ring, in the front end's address space.
    addresses: Option<(u64, u64, u64)>,
    base: u16,
    kick: Option<EventFd>,
    call: Option<EventFd>,
    error: Option<EventFd>,
    enabled: bool,
}

/// State of the front end, which the proxy sends to each tmemd, and the connection to the present one.
struct Proxy {
    tmemd: PathBuf,
    /// Whether a new connection starts the rings at the available index, and so skips the requests in
    /// flight. Otherwise it starts them at the used index.
    skips_in_flight: bool,
    /// File that exists as soon as the driver has probed the device.
    probed: PathBuf,
    link: Option<(Frontend, UnixStream)>,
    offered: u64,
    offered_protocol: VhostUserProtocolFeatures,
    queue_num: u64,
    features: Option<u64>,
    memory: Vec<(VhostUserMemoryRegion, File)>,
    rings: Vec<Ring>,
    counts: Counts,
    reported: Option<Counts>,
}

/// Converts a descriptor from the front end.
fn event_fd(file: File) -> EventFd {
    use std::os::fd::{FromRawFd, IntoRawFd};
    // SAFETY: the descriptor is owned, and its ownership moves to the EventFd.
    unsafe { EventFd::from_raw_fd(file.into_raw_fd()) }
}

fn refused(_: vhost::Error) -> Error {
    Error::BackendInternalError
}

impl Proxy {
    /// Prints the counts if they have changed.
    fn report(&mut self) {
        if self.reported == Some(self.counts) {
            return;
        }
        self.reported = Some(self.counts);
        let Counts {
            connected,
            connections,
            losses,
            reads_forwarded,
            reads_failed,
        } = self.counts;
        let mut out = std::io::stdout().lock();
        // The reader of the counts may have ended already.
        let _ = writeln!(
            out,
            "{{\"connected\":{connected},\"connections\":{connections},\"losses\":{losses},\
             \"reads_forwarded\":{reads_forwarded},\"reads_failed\":{reads_failed}}}"
        )
        .and_then(|()| out.flush());
    }

    /// Sends a message to tmemd, if it is connected. If that fails, the connection ends. The next
    /// connection gets the message from the recorded state.
    fn forward(&mut self, message: impl FnOnce(&mut Frontend) -> vhost::Result<()>) {
        if let Some((frontend, _)) = &mut self.link
            && message(frontend).is_err()
        {
            self.lose();
        }
    }

    fn lose(&mut self) {
        self.link = None;
        self.counts.connected = false;
        self.counts.losses += 1;
        self.report();
    }

    /// Connects to tmemd and sends the recorded state.
    fn connect(&mut self) -> vhost::Result<()> {
        let failed = vhost::Error::IOError;
        let stream = UnixStream::connect(&self.tmemd).map_err(failed)?;
        for set in [UnixStream::set_read_timeout, UnixStream::set_write_timeout] {
            set(&stream, Some(ANSWER)).map_err(failed)?;
        }
        let same = stream.try_clone().map_err(failed)?;
        let mut frontend = Frontend::from_stream(stream, 64);
        self.offered = frontend.get_features()?;
        self.offered_protocol = frontend.get_protocol_features()?;
        frontend.set_protocol_features(self.offered_protocol & PROTOCOL_FEATURES)?;
        self.queue_num = frontend.get_queue_num()?;
        frontend.set_owner()?;
        frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        if let Some(features) = self.features {
            frontend.set_features(features)?;
        }
        if !self.memory.is_empty() {
            frontend.set_mem_table(&self.regions())?;
        }
        for index in 0..self.rings.len() {
            self.rings[index].base = self.next_base(index);
            self.start_ring(&frontend, index)?;
        }
        for (index, ring) in self.rings.iter().enumerate() {
            if ring.enabled {
                frontend.set_vring_enable(index, true)?;
            }
        }
        self.link = Some((frontend, same));
        self.counts.connected = true;
        self.counts.connections += 1;
        self.report();
        Ok(())
    }

    fn start_ring(&self, frontend: &Frontend, index: usize) -> vhost::Result<()> {
        let ring = &self.rings[index];
        let (Some(size), Some((descriptors, used, available))) = (ring.size, ring.addresses) else {
            return Ok(());
        };
        frontend.set_vring_num(index, size as u16)?;
        frontend.set_vring_base(index, ring.base)?;
        frontend.set_vring_addr(
            index,
            &VringConfigData {
                queue_max_size: size as u16,
                queue_size: size as u16,
                flags: 0,
                desc_table_addr: descriptors,
                used_ring_addr: used,
                avail_ring_addr: available,
                log_addr: None,
            },
        )?;
        if let Some(call) = &ring.call {
            frontend.set_vring_call(index, call)?;
        }
        if let Some(error) = &ring.error {
            frontend.set_vring_err(index, error)?;
        }
        if let Some(kick) = &ring.kick {
            frontend.set_vring_kick(index, kick)?;
        }
        Ok(())
    }

    fn regions(&self) -> Vec<VhostUserMemoryRegionInfo> {
        let info = |(region, file): &(VhostUserMemoryRegion, File)| VhostUserMemoryRegionInfo {
            guest_phys_addr: region.guest_phys_addr,
            memory_size: region.memory_size,
            userspace_addr: region.user_addr,
            mmap_offset: region.mmap_offset,
            mmap_handle: file.as_raw_fd(),
        };
        self.memory.iter().map(info).collect()
    }

    /// Returns the index at which a new back end starts a ring: the used or the available index in
    /// guest memory. Both follow 2 bytes of flags.
    fn next_base(&self, index: usize) -> u16 {
        let Some((_, used, available)) = self.rings[index].addresses else {
            return 0;
        };
        let address = if self.skips_in_flight {
            available
        } else {
            used
        } + 2;
        let mut bytes = [0; 2];
        for (region, file) in &self.memory {
            let offset = address.wrapping_sub(region.user_addr);
            if offset < region.memory_size {
                let at = region.mmap_offset + offset;
                file.read_exact_at(&mut bytes, at)
                    .expect("cannot read the guest's memory");
                return u16::from_le_bytes(bytes);
            }
        }
        panic!("ring {index} is outside of the guest's memory");
    }

    fn ring(&mut self, index: u32) -> &mut Ring {
        let index = index as usize;
        assert!(index < 64, "the front end has a queue {index}");
        if self.rings.len() <= index {
            self.rings.resize_with(index + 1, Ring::default);
        }
        &mut self.rings[index]
    }
}

/// Connects to tmemd whenever it is not connected, and notices the end of a connection.
fn keep_connected(proxy: &Mutex<Proxy>) {
    let pause = Timespec::try_from(RECONNECT).expect("the pause does not fit into a timespec");
    loop {
        let watched = {
            let mut proxy = proxy.lock().unwrap();
            // A failed attempt is repeated after the pause.
            if proxy.link.is_none() && proxy.connect().is_err() {
                drop(proxy);
                sleep(RECONNECT);
                continue;
            }
            let (_, stream) = proxy.link.as_ref().expect("tmemd is connected");
            stream.try_clone().expect("cannot duplicate the descriptor")
        };
        // tmemd sends nothing by itself, so only the end of the connection is an event.
        let mut set = [PollFd::new(&watched, PollFlags::RDHUP)];
        if poll(&mut set, Some(&pause)).is_ok_and(|events| events > 0) {
            let mut proxy = proxy.lock().unwrap();
            if proxy.link.is_some() {
                proxy.lose();
            }
        }
    }
}

/// Defines the handlers of messages that the proxy does not offer. The trait demands a handler for
/// every message.
macro_rules! refuse {
    ($($message:ident($($argument:ty),*) -> $result:ty;)*) => {$(
        fn $message(&mut self, $(_: $argument),*) -> Result<$result> {
            Err(Error::InvalidOperation("not offered"))
        }
    )*};
}

impl VhostUserBackendReqHandlerMut for Proxy {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(self.offered)
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        self.features = Some(features);
        self.forward(|tmemd| tmemd.set_features(features));
        Ok(())
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _: Option<bool>,
    ) -> Result<Option<Vec<VhostUserMemoryRegionBase>>> {
        self.memory = regions.iter().copied().zip(files).collect();
        let regions = self.regions();
        self.forward(|tmemd| tmemd.set_mem_table(&regions).map(drop));
        Ok(None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        self.ring(index).size = Some(num);
        self.forward(|tmemd| tmemd.set_vring_num(index as usize, num as u16));
        Ok(())
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        _: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        _: u64,
    ) -> Result<()> {
        let ring = self.ring(index);
        ring.addresses = Some((descriptor, used, available));
        let size = ring.size.ok_or(Error::InvalidParam)? as u16;
        let addresses = VringConfigData {
            queue_max_size: size,
            queue_size: size,
            flags: 0,
            desc_table_addr: descriptor,
            used_ring_addr: used,
            avail_ring_addr: available,
            log_addr: None,
        };
        self.forward(|tmemd| tmemd.set_vring_addr(index as usize, &addresses));
        Ok(())
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        self.ring(index).base = base as u16;
        self.forward(|tmemd| tmemd.set_vring_base(index as usize, base as u16));
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        let base = match &self.link {
            Some((tmemd, _)) => tmemd.get_vring_base(index as usize).map_err(refused)?,
            None => u32::from(self.next_base(index as usize)),
        };
        Ok(VhostUserVringState::new(index, base))
    }

    fn set_vring_kick(&mut self, index: u8, file: Option<File>) -> Result<()> {
        let kick = event_fd(file.ok_or(Error::InvalidParam)?);
        let same = kick.try_clone().map_err(Error::SocketError)?;
        self.ring(index.into()).kick = Some(kick);
        self.forward(|tmemd| tmemd.set_vring_kick(index.into(), &same));
        Ok(())
    }

    fn set_vring_call(&mut self, index: u8, file: Option<File>) -> Result<()> {
        let Some(file) = file else {
            self.ring(index.into()).call = None;
            return Ok(());
        };
        let call = event_fd(file);
        let same = call.try_clone().map_err(Error::SocketError)?;
        self.ring(index.into()).call = Some(call);
        self.forward(|tmemd| tmemd.set_vring_call(index.into(), &same));
        Ok(())
    }

    fn set_vring_err(&mut self, index: u8, file: Option<File>) -> Result<()> {
        let Some(file) = file else {
            self.ring(index.into()).error = None;
            return Ok(());
        };
        let error = event_fd(file);
        let same = error.try_clone().map_err(Error::SocketError)?;
        self.ring(index.into()).error = Some(error);
        self.forward(|tmemd| tmemd.set_vring_err(index.into(), &same));
        Ok(())
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(self.offered_protocol & PROTOCOL_FEATURES)
    }

    fn set_protocol_features(&mut self, _: u64) -> Result<()> {
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(self.queue_num)
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        self.ring(index).enabled = enable;
        self.forward(|tmemd| tmemd.set_vring_enable(index as usize, enable));
        Ok(())
    }

    fn get_config(
        &mut self,
        offset: u32,
        size: u32,
        flags: VhostUserConfigFlags,
    ) -> Result<Vec<u8>> {
        if self.probed.exists() {
            self.counts.reads_failed += 1;
            self.report();
            return Err(Error::InvalidOperation(
                "a configuration read after the probe",
            ));
        }
        self.counts.reads_forwarded += 1;
        self.report();
        let (tmemd, _) = self.link.as_mut().ok_or(Error::Disconnected)?;
        let read = tmemd.get_config(offset, size, flags, &vec![0; size as usize]);
        read.map(|(_, bytes)| bytes).map_err(refused)
    }

    refuse! {
        reset_device() -> ();
        set_config(u32, &[u8], VhostUserConfigFlags) -> ();
        set_gpu_socket(GpuBackend) -> ();
        get_shared_object(VhostUserSharedMsg) -> File;
        get_inflight_fd(&VhostUserInflight) -> (VhostUserInflight, File);
        set_inflight_fd(&VhostUserInflight, File) -> ();
        get_max_mem_slots() -> u64;
        add_mem_region(&VhostUserSingleMemoryRegion, File, Option<bool>)
            -> Option<VhostUserMemoryRegionBase>;
        remove_mem_region(&VhostUserSingleMemoryRegion) -> ();
        set_device_state_fd(VhostTransferStateDirection, VhostTransferStatePhase, File)
            -> Option<File>;
        check_device_state() -> ();
        get_shmem_config() -> VhostUserShMemConfig;
        set_log_base(&VhostUserLog, File) -> ();
    }
}

/// Serves the front end until it closes its connection.
fn serve(listener: &UnixListener, proxy: &Arc<Mutex<Proxy>>) {
    let (front_end, _) = listener.accept().expect("cannot accept the front end");
    let begun = Instant::now();
    while !proxy.lock().unwrap().counts.connected {
        assert!(
            begun.elapsed() < FIRST_CONNECTION,
            "tmemd does not accept a connection: start it before the front end"
        );
        sleep(RECONNECT);
    }
    let mut handler = BackendReqHandler::from_stream(front_end, proxy.clone());
    loop {
        match handler.handle_request() {
            Ok(()) | Err(Error::InvalidOperation(_)) => (),
            Err(Error::Disconnected | Error::PartialMessage) => return,
            Err(error) => eprintln!("vhost-proxy: a message of the front end failed: {error}"),
        }
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (socket, tmemd, skips_in_flight) = match arguments.as_slice() {
        [socket, tmemd] => (socket, tmemd, false),
        [socket, tmemd, option] if option == "--skip" => (socket, tmemd, true),
        _ => {
            eprintln!("usage: vhost-proxy SOCKET SOCKET-OF-TMEMD [--skip]");
            std::process::exit(2);
        }
    };
    let listener = UnixListener::bind(Path::new(socket)).expect("cannot bind the socket");
    let proxy = Arc::new(Mutex::new(Proxy {
        tmemd: tmemd.into(),
        skips_in_flight,
        probed: format!("{socket}.probed").into(),
        link: None,
        offered: 0,
        offered_protocol: VhostUserProtocolFeatures::empty(),
        queue_num: 0,
        features: None,
        memory: Vec::new(),
        rings: Vec::new(),
        counts: Counts::default(),
        reported: None,
    }));
    let connector = proxy.clone();
    std::thread::spawn(move || keep_connected(&connector));
    serve(&listener, &proxy);
}
