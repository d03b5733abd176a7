// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Fuzz target: vhost-user messages with any bytes and descriptors, sent through the socket of a
//! complete daemon. Rings run at the same time, and the daemon serves a neighbour (another VM)
//! throughout.
//!
//! In this target the daemon runs its threads, so the order of events varies between two runs of an
//! input. These properties must hold: no thread panics, the daemon closes its end of a connection
//! soon after the front end has, and the neighbour has its pages.

use std::cell::RefCell;
use std::fs::File;
use std::io::{ErrorKind, IoSlice, Read};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::retry_on_intr;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use tmem_model::{Driver, DriverConfig, GuestConfig, Request, TestDaemon};

use crate::input::Input;
use crate::ram::{BASE, Ram, TOP};

/// Maximum number of steps that an input executes.
const STEPS_MAX: usize = 40;
/// Time limit of every wait for the daemon, long enough for a busy machine.
const WAIT: Duration = Duration::from_secs(20);
/// Bytes of guest memory for the parts of a virtqueue. Each queue with a number below RINGS - 1 has
/// memory of its own. All queues from number RINGS - 1 on share the memory of one virtqueue.
const RING_BYTES: u64 = 0x1000;
const RINGS: u64 = 4;
const SIZE: u16 = 16;
/// First guest address for requests and their answers.
const ARENA: u64 = BASE + RINGS * RING_BYTES;
/// Maximum number of file descriptors in a message: one more than the daemon's vhost library
/// accepts.
const FILES_MAX: usize = 33;

const NEED_REPLY: u32 = 1 << 3;
const VERSION: u32 = 1;

const SET_FEATURES: u32 = 2;
const SET_OWNER: u32 = 3;
const SET_MEM_TABLE: u32 = 5;
const SET_LOG_BASE: u32 = 6;
const SET_VRING_NUM: u32 = 8;
const SET_VRING_ADDR: u32 = 9;
const SET_VRING_BASE: u32 = 10;
const GET_VRING_BASE: u32 = 11;
const SET_VRING_KICK: u32 = 12;
const SET_VRING_CALL: u32 = 13;
const SET_VRING_ERR: u32 = 14;
const SET_PROTOCOL_FEATURES: u32 = 16;
const SET_VRING_ENABLE: u32 = 18;
const GET_CONFIG: u32 = 24;
const SET_CONFIG: u32 = 25;
const RESET_DEVICE: u32 = 34;
const ADD_MEM_REG: u32 = 37;
const REM_MEM_REG: u32 = 38;

/// Features that the front end accepts: virtio 1, event indices, indirect tables, protocol
/// features.
const FEATURES: u64 = 1 << 32 | 1 << 30 | 1 << 29 | 1 << 28;
/// Protocol features that the front end accepts: MQ, LOG_SHMFD, REPLY_ACK, CONFIG, RESET_DEVICE,
/// CONFIGURE_MEM_SLOTS.
const PROTOCOL: u64 = 1 | 1 << 1 | 1 << 3 | 1 << 9 | 1 << 13 | 1 << 15;

/// Whether a thread of this process has panicked. The fuzz target checks this flag, because the
/// daemon itself continues after a panic of one of its threads.
static PANICKED: AtomicBool = AtomicBool::new(false);

/// The daemon, which is created once for all inputs, and the neighbour, another VM of the daemon.
struct World {
    daemon: TestDaemon,
    neighbour: Driver,
    inputs: u64,
}

thread_local! {
    static WORLD: RefCell<World> = RefCell::new(World::new());
}

impl World {
    fn new() -> World {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            PANICKED.store(true, SeqCst);
            before(panic);
        }));
        let daemon = TestDaemon::start(&["liar,trust_domain=team", "neighbour,trust_domain=team"]);
        let guest = GuestConfig {
            name: "neighbour".into(),
            ..GuestConfig::default()
        };
        let mut neighbour =
            Driver::new(guest, DriverConfig::default()).expect("cannot create the simulated guest");
        let connected = neighbour.connect(&daemon.path("neighbour.sock"));
        connected.expect("cannot connect to the VM's socket");
        World {
            daemon,
            neighbour,
            inputs: 0,
        }
    }

    /// Asserts that the daemon still serves the neighbour correctly.
    fn check_neighbour(&mut self) {
        self.inputs += 1;
        for _ in 0..2 {
            self.neighbour
                .step()
                .expect("the daemon did not answer the neighbour VM's requests correctly");
        }
        if self.inputs.is_multiple_of(16) {
            self.neighbour
                .get_all()
                .expect("the daemon did not answer the neighbour VM's requests correctly");
        }
        assert!(!PANICKED.load(SeqCst), "a thread of the daemon panicked");
    }
}

/// Runs the fuzz target with an input: executes its steps, and then checks the neighbour.
pub fn run(bytes: &[u8]) {
    WORLD.with_borrow_mut(|world| {
        let mut input = Input::new(bytes);
        let path = world.daemon.path("liar.sock");
        let mut front_end = FrontEnd::connect(&path);
        for _ in 0..STEPS_MAX {
            if input.is_empty() {
                break;
            }
            if !front_end.step(&mut input) {
                front_end.hang_up();
                front_end = FrontEnd::connect(&path);
            }
        }
        front_end.hang_up();
        world.check_neighbour();
    });
}

/// Hostile front end (VMM) with its guest, which the fuzzer controls.
struct FrontEnd {
    stream: UnixStream,
    ram: Ram,
    event: OwnedFd,
    generation: u64,
    offered: [u16; RINGS as usize],
    /// Whether the daemon has ended the connection.
    ended: bool,
}

fn memfd(sealed: bool, bytes: u64) -> OwnedFd {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
    let fd = memfd_create("liar", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING);
    let fd = fd.expect("cannot create a memfd");
    ftruncate(&fd, bytes).expect("cannot set the length of the memfd");
    if sealed {
        fcntl_add_seals(&fd, SealFlags::SHRINK).expect("cannot seal the memfd");
    }
    fd
}

impl FrontEnd {
    fn connect(path: &Path) -> FrontEnd {
        let deadline = Instant::now() + WAIT;
        loop {
            let stream = UnixStream::connect(path).expect("cannot connect to the socket");
            stream
                .set_read_timeout(Some(WAIT))
                .expect("cannot set the socket's time-out");
            stream
                .set_write_timeout(Some(WAIT))
                .expect("cannot set the socket's time-out");
            let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
            let mut front_end = FrontEnd {
                stream,
                ram: Ram::new(),
                event: eventfd(0, flags).expect("cannot create an eventfd"),
                generation: 0,
                offered: [0; RINGS as usize],
                ended: false,
            };
            // Find out whether this connection is usable. The daemon closes it if it has not ended
            // the previous connection yet.
            front_end.send(SET_PROTOCOL_FEATURES, 0, &PROTOCOL.to_le_bytes(), &[]);
            front_end.read_generation();
            if !front_end.ended {
                return front_end;
            }
            front_end.ram.keep();
            assert!(
                Instant::now() < deadline,
                "the daemon did not free the slot of the connection"
            );
            std::thread::yield_now();
        }
    }

    fn send(&mut self, code: u32, flags: u32, body: &[u8], files: &[BorrowedFd<'_>]) {
        let mut message = code.to_le_bytes().to_vec();
        message.extend((flags | VERSION).to_le_bytes());
        message.extend((body.len() as u32).to_le_bytes());
        message.extend(body);
        self.send_bytes(&message, files);
    }

    fn send_bytes(&mut self, bytes: &[u8], files: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(files)));
        }
        let bytes = [IoSlice::new(bytes)];
        // Record an error, which means that the daemon has ended the connection.
        let flags = SendFlags::NOSIGNAL;
        let sent = retry_on_intr(|| sendmsg(&self.stream, &bytes, &mut control, flags));
        self.ended |= sent.is_err();
    }

    /// Reads the generation: sends GET_CONFIG, and reads answers until that to GET_CONFIG.
    fn read_generation(&mut self) {
        let body = [0u32, 8, 0].map(u32::to_le_bytes).concat();
        self.send(GET_CONFIG, 0, &[body, vec![0; 8]].concat(), &[]);
        while !self.ended {
            let mut header = [0; 12];
            self.ended |= self.stream.read_exact(&mut header).is_err();
            let field = |at: usize| {
                u32::from_le_bytes(
                    header[at..at + 4]
                        .try_into()
                        .expect("the slice does not have 4 bytes"),
                )
            };
            let mut body = vec![0; field(8) as usize % 4096];
            self.ended |= self.stream.read_exact(&mut body).is_err();
            if field(0) == GET_CONFIG {
                if let Some(bytes) = body.get(12..20) {
                    self.generation = u64::from_le_bytes(
                        bytes.try_into().expect("the slice does not have 8 bytes"),
                    );
                }
                return;
            }
        }
    }

    /// Closes the connection, and waits until the daemon has closed its end.
    fn hang_up(mut self) {
        let _ = self.stream.shutdown(Shutdown::Write);
        let mut sink = [0; 1024];
        loop {
            match self.stream.read(&mut sink) {
                Ok(0) => break,
                Ok(_) => {}
                // Read again, because the alarm signal of libFuzzer may interrupt the read.
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::ConnectionReset => break,
                Err(error) => panic!("the daemon did not end the connection: {error}"),
            }
        }
        self.ram.keep();
    }

    /// Sets up a valid virtqueue: memory table, ring addresses, descriptors, and enabling.
    fn set_up(&mut self, queue: u64) {
        self.send(SET_FEATURES, 0, &FEATURES.to_le_bytes(), &[]);
        self.memory(false);
        let at = Ram::user(BASE + queue.min(RINGS - 1) * RING_BYTES);
        let state = |value: u32| [queue as u32, value].map(u32::to_le_bytes).concat();
        let base = self.offered[queue.min(RINGS - 1) as usize];
        let used = BASE + queue.min(RINGS - 1) * RING_BYTES + 0x600;
        self.ram.write(used + 2, &base.to_le_bytes());
        self.send(SET_VRING_NUM, 0, &state(SIZE.into()), &[]);
        self.send(SET_VRING_BASE, 0, &state(base.into()), &[]);
        let addresses = [at, at + 0x600, at + 0x400, 0]
            .map(u64::to_le_bytes)
            .concat();
        self.send(SET_VRING_ADDR, 0, &[state(0), addresses].concat(), &[]);
        let event = self
            .event
            .try_clone()
            .expect("cannot duplicate the descriptor");
        for code in [SET_VRING_KICK, SET_VRING_CALL, SET_VRING_ERR] {
            self.send(code, 0, &queue.to_le_bytes(), &[event.as_fd()]);
        }
        self.send(SET_VRING_ENABLE, 0, &state(1), &[]);
    }

    fn memory(&mut self, partly: bool) {
        let (mut regions, files) = self.ram.table();
        if partly {
            regions.pop();
        }
        let mut body = [regions.len() as u32, 0].map(u32::to_le_bytes).concat();
        for region in &regions {
            let (guest, bytes) = ({ region.guest_phys_addr }, { region.memory_size });
            let (user, offset) = ({ region.user_addr }, { region.mmap_offset });
            body.extend([guest, bytes, user, offset].map(u64::to_le_bytes).concat());
        }
        let files: Vec<_> = files.iter().take(regions.len()).map(File::as_fd).collect();
        self.send(SET_MEM_TABLE, 0, &body, &files);
    }

    /// Puts a request that the input chooses into a ring, and kicks the queue.
    fn request(&mut self, input: &mut Input<'_>) {
        let (queue, shape) = (input.below(RINGS as usize), input.u8());
        let (object, index) = (1 + u64::from(shape & 3), u64::from(shape >> 4));
        let request = match shape >> 2 & 3 {
            0 => Request::PoolCreate { pool: 1, flags: 0 },
            1 => Request::Put {
                pool: 1,
                pages: vec![tmem_model::PutPage {
                    object,
                    index,
                    cookie: 1,
                    flags: 0,
                    page: Box::new([shape; 4096]),
                }],
            },
            2 => Request::Get {
                pool: 1,
                object,
                index,
                cookies: vec![1; 2],
                retain: 0,
            },
            _ => Request::Report(Box::new([shape & 1; 152])),
        };
        let mut encoded = request.encode(self.generation);
        let (at, bend) = (usize::from(input.u8()), input.u8());
        if let Some(byte) = encoded.meta.get_mut(at) {
            *byte ^= bend;
        }
        let readable = [encoded.meta, encoded.data].concat();
        let room = encoded.answer_meta_bytes + encoded.answer_data_bytes;
        let slot = u64::from(self.offered[queue] % SIZE) / 2 * 2;
        let place = ARENA + slot * 0x4000 % 0x3_0000;
        self.ram.write(place, &readable);
        let table = BASE + queue as u64 * RING_BYTES;
        let chain = [(place, readable.len(), 1u16), (place + 0x2000, room, 2)];
        for (number, (address, bytes, flags)) in (slot..).zip(chain) {
            let mut descriptor = address.to_le_bytes().to_vec();
            descriptor.extend((bytes as u32).to_le_bytes());
            descriptor.extend(flags.to_le_bytes());
            descriptor.extend((number as u16 + 1).to_le_bytes());
            self.ram.write(table + 16 * number, &descriptor);
        }
        let (avail, offered) = (table + 0x400, self.offered[queue]);
        let place = avail + 4 + 2 * u64::from(offered % SIZE);
        self.ram.write(place, &(slot as u16).to_le_bytes());
        self.offered[queue] = offered.wrapping_add(1);
        self.ram
            .write(avail + 2, &self.offered[queue].to_le_bytes());
        self.kick();
    }

    fn kick(&self) {
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    /// Executes one step of the input. Returns false if the front end must close the connection and
    /// connect again.
    fn step(&mut self, input: &mut Input<'_>) -> bool {
        match input.below(12) {
            0 => self.set_up(u64::from(input.u8()) % 20),
            1..=3 => self.request(input),
            4 => {
                // Overwrite guest memory in which rings or requests may be.
                let at = BASE + u64::from(input.u16()) % 0x8000;
                self.ram.write(at, &input.u32().to_le_bytes());
                self.kick();
            }
            5 => {
                let code = [SET_OWNER, RESET_DEVICE, GET_VRING_BASE][input.below(3)];
                let body = [u32::from(input.u8()) % 18, 0]
                    .map(u32::to_le_bytes)
                    .concat();
                let body = if code == GET_VRING_BASE { body } else { vec![] };
                self.send(code, NEED_REPLY * u32::from(input.u8() & 1), &body, &[]);
            }
            6 => self.memory(input.u8() & 1 != 0),
            7 => self.read_generation(),
            8 => {
                let count = input.below(64);
                let bytes = input.bytes(count).to_vec();
                self.send_bytes(&bytes, &[]);
            }
            9 => {
                self.kick();
                return false;
            }
            _ => self.message(input),
        }
        true
    }

    /// Sends a vhost-user message whose body has the right form, with numbers and descriptors from
    /// the input.
    fn message(&mut self, input: &mut Input<'_>) {
        const CODES: [u32; 17] = [
            SET_FEATURES,
            SET_MEM_TABLE,
            SET_LOG_BASE,
            SET_VRING_NUM,
            SET_VRING_ADDR,
            SET_VRING_BASE,
            GET_VRING_BASE,
            SET_VRING_KICK,
            SET_VRING_CALL,
            SET_VRING_ERR,
            SET_PROTOCOL_FEATURES,
            SET_VRING_ENABLE,
            GET_CONFIG,
            SET_CONFIG,
            ADD_MEM_REG,
            REM_MEM_REG,
            0,
        ];
        let code = match CODES[input.below(CODES.len())] {
            0 => u32::from(input.u8()) % 50,
            code => code,
        };
        let flags = u32::from(input.u8() % 16) & !3;
        let region = |input: &mut Input<'_>| {
            let guest = match input.below(3) {
                0 => BASE,
                1 => TOP,
                _ => input.number(),
            };
            let (bytes, user, offset) = match input.below(3) {
                0 => (0x1000, 0x7000_0000, 0),
                _ => (input.number(), input.number(), input.number()),
            };
            [guest, bytes, user, offset].map(u64::to_le_bytes).concat()
        };
        let body = match code {
            SET_MEM_TABLE => {
                let count = u32::from(input.u8()) % 10;
                let mut body = [count, 0].map(u32::to_le_bytes).concat();
                for _ in 0..count {
                    body.extend(region(input));
                }
                body
            }
            ADD_MEM_REG | REM_MEM_REG => [vec![0; 8], region(input)].concat(),
            SET_VRING_NUM | SET_VRING_BASE | GET_VRING_BASE | SET_VRING_ENABLE => {
                let index = u32::from(input.u8()) % 20;
                [index, input.number() as u32]
                    .map(u32::to_le_bytes)
                    .concat()
            }
            SET_VRING_ADDR => {
                let index = u32::from(input.u8()) % 20;
                let numbers = [0; 4].map(|_| match input.u8() {
                    near @ 0..=127 => Ram::user(BASE) + u64::from(near) * 0x200,
                    _ => input.number(),
                });
                let index = [index, 0].map(u32::to_le_bytes).concat();
                [index, numbers.map(u64::to_le_bytes).concat()].concat()
            }
            SET_LOG_BASE => [input.number(), input.number()]
                .map(u64::to_le_bytes)
                .concat(),
            GET_CONFIG | SET_CONFIG => {
                let (offset, bytes) = (input.number() as u32, input.u8() % 64);
                let head = [offset, bytes.into(), 0].map(u32::to_le_bytes).concat();
                [head, vec![0; bytes.into()]].concat()
            }
            SET_VRING_KICK | SET_VRING_CALL | SET_VRING_ERR => {
                let index = u64::from(input.u8()) % 20;
                (index | u64::from(input.u8() & 1) << 8)
                    .to_le_bytes()
                    .to_vec()
            }
            _ => {
                let count = input.below(3) * 8;
                [input.number(), input.number()]
                    .map(u64::to_le_bytes)
                    .concat()[..count]
                    .to_vec()
            }
        };
        let length = match input.u8() {
            cut @ 0..=15 => usize::from(cut).min(body.len()),
            _ => body.len(),
        };
        let file: OwnedFd = match input.below(8) {
            0 | 1 => self
                .event
                .try_clone()
                .expect("cannot duplicate the descriptor"),
            2 | 3 => self
                .ram
                .file
                .try_clone()
                .expect("cannot duplicate the descriptor")
                .into(),
            4 => memfd(true, 0x4000),
            5 => memfd(false, 0x4000),
            6 => std::io::pipe().expect("cannot create a pipe").0.into(),
            _ => File::open("/dev/null")
                .expect("cannot open the file")
                .into(),
        };
        let files = match input.u8() {
            0..=63 => 0,
            64..=191 => 1,
            many => usize::from(many) % (FILES_MAX + 1),
        };
        let files = vec![file.as_fd(); files];
        self.send(code, flags, &body[..length], &files);
    }
}
