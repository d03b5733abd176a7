// SPDX-License-Identifier: Apache-2.0 OR MIT
//! tmem-hook: libvirt runs it from /etc/libvirt/hooks/qemu.d/ when a VM starts, arrives or ends.
//!
//! Before a start, the hook checks whether the VM can have its cache. It asks the daemon to serve
//! the VM with the quota of the domain's metadata. It also asks the daemon to shrink the pool, so
//! that the host has memory for the VM. When the VM has ended, the hook tells the daemon to stop
//! serving it.
//!
//! The hook stops a start only if the domain's metadata says required='yes', or if the host lacks
//! memory and the option --overcommit forbids that. In all other cases the hook exits with success. Otherwise, a hook that fails when libvirtd restarts would make libvirt
//! kill the running VM. The hook never calls libvirt, because libvirt waits for the hook.
//!
//! The hook's stdout is the VM's new XML. It is empty except for a VM that migrates within its
//! host, because the two ends of such a migration cannot share one socket.
//!
//! If the daemon does not answer, the hook remembers this for some seconds (`late.rs`), so that only
//! one of many VMs waits for it.
//!
//! Usage: tmem-hook [--socket PATH] [--owner USER] [--late-file PATH] [--overcommit yes|no] DOMAIN
//! OPERATION ..., with the domain's XML on stdin.

mod late;

use late::LateRecord;
use std::io::{Read, Write};
use std::os::unix::net::UnixDatagram;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;
use tmem_control as api;
use tmem_control::VarlinkClientInterface;
use tmem_control::overcommit::Overcommit;
use tmem_libvirt::domain::{Device, Domain};
use tmem_libvirt::{CallError, Owner};

/// Longest time that the hook delays the start of a VM if the daemon does not answer. The daemon
/// normally answers within milliseconds. The time is short because people wait for the start.
const TIMEOUT: Duration = Duration::from_secs(2);

/// Longest time that the start of a VM waits until the pool has shrunk. It is a little longer than
/// the time after which the daemon answers the request in any case.
const RELEASE_TIMEOUT: Duration = Duration::from_millis(1500);

/// Longest time that the hook waits for a daemon that did not answer another hook a short time ago.
/// It suffices for a daemon that answers again on a busy host. Hooks wait so within 10 s only
/// ([`LateRecord`]), so a hundred starts one after the other are delayed by 10 s at most.
const LATE_TIMEOUT: Duration = Duration::from_millis(200);

/// Pause before the hook asks again if the daemon closed the connection because it had too many
/// clients. Most other clients have disconnected after this pause.
const PAUSE: Duration = Duration::from_millis(50);

/// True if the daemon has closed at least one connection of the hook without an answer.
static CONNECTION_CLOSED: AtomicBool = AtomicBool::new(false);

/// True while the hook looks a user up, which may ask a directory service.
static IN_LOOK_UP: AtomicBool = AtomicBool::new(false);

/// Priority of the hook's messages to syslog: facility `daemon` and level `warning`.
const SYSLOG_PRIORITY: u32 = 3 * 8 + 4;

/// The operations of libvirt that the hook handles. libvirt passes their names to the hook.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Operation {
    /// A VM is about to start. If the hook fails, libvirt does not start the VM.
    Prepare,
    /// A VM is about to arrive by a migration. The hook may change the VM's XML.
    Migrate,
    /// libvirtd has restarted and found the VM running. If the hook failed, libvirt would kill the
    /// VM.
    Reconnect,
    /// A VM has ended, or could not start. libvirt runs the hook for it once or several times.
    Release,
}

/// The hook's options.
struct Options {
    /// The daemon's control socket.
    socket: PathBuf,
    /// The user who may connect to a VM's socket.
    owner: Option<String>,
    /// Record that the daemon did not answer.
    late: LateRecord,
    /// True if a VM may start although the host could not give all VMs their memory at once.
    overcommit: bool,
}

/// Reason why a VM does not start, has no cache, or has a cache with other settings than its domain
/// requests.
struct Problem {
    required: bool,
    /// True if the host lacks memory for the VM; false if the cache has a problem.
    lacks_memory: bool,
    /// True if the daemon did not answer within [`TIMEOUT`].
    late: bool,
    what: String,
}

fn main() -> ExitCode {
    let mut words: Vec<String> = std::env::args_os()
        .skip(1)
        .map(|word| word.to_string_lossy().into_owned())
        .collect();
    let mut options = Options {
        socket: api::DEFAULT_SOCKET.into(),
        owner: None,
        late: LateRecord::new(late::DEFAULT_PATH.into()),
        overcommit: true,
    };
    while words.len() >= 2 {
        match words[0].as_str() {
            "--socket" => options.socket = PathBuf::from(&words[1]),
            "--owner" => options.owner = Some(words[1].clone()),
            "--overcommit" => options.overcommit = words[1] != "no",
            "--late-file" => options.late = LateRecord::new(PathBuf::from(&words[1])),
            _ => break,
        }
        words.drain(..2);
    }
    let options = Arc::new(options);
    // stdin is read to its end for all operations, because libvirt waits until the hook has read
    // it.
    let mut xml = Vec::new();
    let read = std::io::stdin().read_to_end(&mut xml);
    let operation = match words.get(1).map(String::as_str) {
        Some("prepare") => Operation::Prepare,
        Some("migrate") => Operation::Migrate,
        Some("reconnect") => Operation::Reconnect,
        Some("release") => Operation::Release,
        _ => return ExitCode::SUCCESS,
    };
    let work = move || match (read, String::from_utf8(xml)) {
        (Ok(_), Ok(xml)) => handle(&xml, operation, &options),
        _ => Some(Problem::optional("the domain's XML cannot be read".into())),
    };
    let bug = |_| Some(Problem::optional("a bug: tmem-hook panicked".into()));
    let problem = catch_unwind(std::panic::AssertUnwindSafe(work)).unwrap_or_else(bug);
    let Some(problem) = problem else {
        return ExitCode::SUCCESS;
    };
    let what = problem.what;
    let domain = words.first().map_or("?", String::as_str);
    let stop = problem.required && operation == Operation::Prepare;
    let (begin, end) = match (operation, stop) {
        (_, true) if problem.lacks_memory => {
            ("cannot have its memory", "; libvirt does not start it")
        }
        (_, true) => (
            "cannot use the cache that it requires",
            "; libvirt does not start it",
        ),
        (Operation::Prepare, false) => ("cannot use its cache", "; it starts without a cache"),
        (Operation::Migrate, false) => (
            "could not be looked up in the daemon",
            "; if it is migrated within this host, it continues without its cache",
        ),
        (Operation::Reconnect, false) => ("cannot use its cache", ""),
        (Operation::Release, false) => (
            "has ended, but could not be removed from the daemon",
            "; its socket and its reserve remain until it is started and stopped again",
        ),
    };
    let message = format!("virtio-tmem: domain {domain} {begin}: {what}{end}");
    // libvirt shows this message only if the hook stops the start. The hook uses `writeln!`,
    // because `eprintln!` panics if stderr cannot be written, for example on a full disk. A panic
    // would make the hook fail.
    let _ = writeln!(std::io::stderr(), "{message}");
    if !stop {
        log(&message);
    }
    if stop {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    }
}

impl Problem {
    /// Creates the problem of a VM that starts without its cache.
    fn optional(what: String) -> Problem {
        Problem {
            required: false,
            lacks_memory: false,
            late: false,
            what,
        }
    }
}

/// Writes a message to the host's syslog, if the host has one.
fn log(message: &str) {
    let line = format!("<{SYSLOG_PRIORITY}>tmem-hook: {message}");
    let sent = UnixDatagram::unbound().and_then(|log| {
        log.set_nonblocking(true)?;
        log.send_to(line.as_bytes(), "/dev/log")
    });
    // An error of writing to syslog is ignored, because the hook has no other place to report it.
    drop(sent);
}

/// Handles one operation of libvirt, and returns the problem if there is one.
fn handle(xml: &str, operation: Operation, options: &Arc<Options>) -> Option<Problem> {
    let domain = match Domain::parse(xml) {
        Ok(domain) => Arc::new(domain),
        Err(error) => return Some(Problem::optional(error.0)),
    };
    // A VM that requires its cache waits for the daemon in any case, because it cannot start without
    // it.
    let required = matches!(&domain.cache, Some(Ok(cache)) if cache.required);
    let waits = operation == Operation::Prepare && required;
    if !waits && is_still_late(options) {
        let what = "the daemon did not answer another VM some seconds ago, and does not answer now";
        return domain.device.as_ref().map(|_| Problem {
            late: true,
            ..Problem::optional(what.into())
        });
    }
    if operation == Operation::Migrate {
        return handle_migration(xml, &domain, options);
    }
    let problem = check(&domain, operation, options);
    // Shrink the pool only if the VM will start, because only then does the VM take memory. Do not
    // ask a daemon that has just been late, because that would delay the start once more.
    if operation == Operation::Prepare && !problem.as_ref().is_some_and(|p| p.required || p.late) {
        let (bytes, own) = (domain.host_memory_bytes, options.clone());
        // A pool that cannot shrink does not prevent the VM's start.
        let missing_bytes = within(RELEASE_TIMEOUT, move || release_memory(bytes, &own));
        match missing_bytes {
            None => record_late(options),
            Some(0) => (),
            Some(missing_bytes) => {
                let what = format!(
                    "the host lacks {} MiB if all VMs use their memory at once. Move a VM to \
                     another host, or add swap",
                    missing_bytes.div_ceil(1 << 20)
                );
                if !options.overcommit {
                    return Some(Problem {
                        required: true,
                        lacks_memory: true,
                        ..Problem::optional(what)
                    });
                }
                log(&format!(
                    "virtio-tmem: domain {} starts, but {what}",
                    domain.name
                ));
            }
        }
    }
    problem
}

/// Returns true if the daemon did not answer another hook a short time ago, and does not answer now.
/// An error is an answer here: the caller asks again, and gets the same error at once.
fn is_still_late(options: &Options) -> bool {
    if !options.late.is_recent(&options.socket) {
        return false;
    }
    let socket = options.socket.clone();
    let answer = within(LATE_TIMEOUT, move || {
        call(&socket, |client| client.list_vms().call()).map(drop)
    });
    // A daemon that closes the connection has too many clients, but it answers.
    let answers = answer.is_some() || CONNECTION_CLOSED.load(Ordering::Relaxed);
    if answers {
        options.late.remove();
    }
    !answers
}

/// Records that the daemon did not answer in time. Records nothing if the time passed for another
/// reason: the daemon has too many clients, or a directory service does not answer.
fn record_late(options: &Options) {
    if CONNECTION_CLOSED.load(Ordering::Relaxed) || IN_LOOK_UP.load(Ordering::Relaxed) {
        return;
    }
    if let Err(error) = options.late.write(&options.socket) {
        log(&format!(
            "virtio-tmem: cannot record that the daemon did not answer, so other VMs wait, too: \
             {error}"
        ));
    }
}

/// Handles a VM that arrives by a migration. If it comes from this host, the hook gives it a second
/// socket, because the source of the migration still uses the first one. Returns a problem if the
/// daemon gives no list of its VMs or the socket cannot be changed.
fn handle_migration(xml: &str, domain: &Arc<Domain>, options: &Arc<Options>) -> Option<Problem> {
    let device = domain.device.clone()?;
    let socket = options.socket.clone();
    let list = within(TIMEOUT, move || {
        call(&socket, |client| client.list_vms().call())
    });
    if list.is_none() {
        record_late(options);
    }
    let vms = match list.unwrap_or_else(|| Err(CallError::Failed(timeout_text()))) {
        Ok(list) => list.vms,
        Err(error) => return Some(Problem::optional(error.to_string())),
    };
    let is_vm = |vm: &api::Vm| vm.uuid.as_ref() == Some(&domain.uuid) && vm.socket == device.socket;
    if !vms.iter().any(is_vm) {
        return None;
    }
    let other = tmem_libvirt::other_socket(&device.socket, &domain.uuid);
    match tmem_libvirt::domain::move_socket(xml, &other) {
        Ok(xml) => {
            // An error of this write is ignored. It means that libvirt does not read the XML, which
            // libvirt itself reports.
            let _ = std::io::stdout().write_all(xml.as_bytes());
            None
        }
        Err(error) => Some(Problem::optional(error.0)),
    }
}

fn timeout_text() -> String {
    let seconds = TIMEOUT.as_secs();
    if IN_LOOK_UP.load(Ordering::Relaxed) {
        return format!(
            "no source of accounts answered within {seconds} s who the user of its QEMU is: see \
             getent passwd and /etc/nsswitch.conf, or give the user's number with --owner"
        );
    }
    match CONNECTION_CLOSED.load(Ordering::Relaxed) {
        true => format!(
            "the daemon has had too many clients for {seconds} s, or refuses this user: its log \
             has the reason"
        ),
        false => format!("the daemon did not answer within {seconds} s"),
    }
}

/// Sends a request to the daemon, and sends it again whenever the daemon closes the connection
/// without an answer. The daemon closes connections when it has too many clients, for example when
/// many VMs start together. Repeating a request of the hook does no harm.
///
/// The loop has no limit. The caller uses [`within`], which stops waiting for it.
fn call<T>(
    socket: &Path,
    method: impl Fn(&mut api::VarlinkClient) -> api::Result<T>,
) -> Result<T, CallError> {
    loop {
        let client = api::connect(socket);
        let mut client =
            client.map_err(|error| CallError::no_answer(socket, &error.to_string()))?;
        match method(&mut client) {
            Err(error) if api::is_connection_closed(&error) => {
                CONNECTION_CLOSED.store(true, Ordering::Relaxed);
                std::thread::sleep(PAUSE);
            }
            result => return result.map_err(|error| CallError::new(socket, &error)),
        }
    }
}

/// Runs `work` on another thread, and returns None if it takes longer than `time`.
fn within<T: Send + 'static>(
    time: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        // Sending fails if the time limit has passed, because the caller no longer waits for the
        // result.
        let _ = sender.send(work());
    });
    receiver.recv_timeout(time).ok()
}

/// Asks the daemon to shrink the pool so that the host has `bytes` available for a VM that starts.
/// The VM need not have the virtio-tmem device.
///
/// Returns the bytes that the host lacks if all VMs use their memory at once, this one included;
/// 0 if that is unknown. If the VM must then not start, the pool does not shrink.
fn release_memory(bytes: u64, options: &Options) -> u64 {
    let bytes = i64::try_from(bytes).unwrap_or(0);
    if bytes == 0 {
        return 0;
    }
    // The statistics are read before the pool shrinks. Afterwards, memory that the pool has released
    // might not yet count as available.
    let stats = call(&options.socket, |client| client.get_stats(None).call()).ok();
    let memory = stats.and_then(|stats| Overcommit::new(&stats.daemon, &stats.pool));
    let missing_bytes = memory.map_or(0, |memory| memory.missing_bytes(bytes));
    if missing_bytes == 0 || options.overcommit {
        let _ = call(&options.socket, |client| {
            client.release_memory(bytes).call()
        });
    }
    missing_bytes.unsigned_abs()
}

/// Handles one operation for a domain, and returns the problem if there is one. Does nothing if the
/// domain does not have the device.
fn check(domain: &Arc<Domain>, operation: Operation, options: &Arc<Options>) -> Option<Problem> {
    let device = domain.device.clone()?;
    let required = matches!(&domain.cache, Some(Ok(cache)) if cache.required);
    let (domain, own) = (domain.clone(), options.clone());
    let result = within(TIMEOUT, move || match operation {
        Operation::Prepare | Operation::Reconnect => prepare(&domain, &device, &own),
        Operation::Release => release(&domain, &device, &own),
        Operation::Migrate => Ok(()),
    });
    let late = result.is_none();
    if late {
        record_late(options);
    }
    let what = result.unwrap_or_else(|| Err(timeout_text())).err()?;
    Some(Problem {
        required,
        late,
        ..Problem::optional(what)
    })
}

/// Asks the daemon to serve the VM, and checks that the daemon supports the device's `retain=on`.
fn prepare(domain: &Domain, device: &Device, options: &Options) -> Result<(), String> {
    serve(domain, device, options)?;
    if device.retain == Some(true) && call(&options.socket, api::knows_retained_pages) == Ok(false)
    {
        return Err(format!(
            "its device has retain=on, and the daemon does not know retained pages, so QEMU refuses \
             the daemon: update tmemd, or run tmemctl attach {} --retain off",
            domain.name
        ));
    }
    Ok(())
}

/// Checks that the daemon can map the VM's memory, and asks it to serve the VM with the domain's
/// settings.
fn serve(domain: &Domain, device: &Device, options: &Options) -> Result<(), String> {
    domain.memory.clone().map_err(|error| error.0)?;
    let socket = &options.socket;
    let cache = match &domain.cache {
        Some(cache) => cache.clone().map_err(|error| error.0)?,
        // The device was added by hand, without a quota in the metadata. If the daemon already
        // serves the VM with settings from its own configuration, leave these settings unchanged.
        None => {
            let list = call(socket, |client| client.list_vms().call());
            let vms = list.map_err(|error| error.to_string())?.vms;
            let is_vm =
                |vm: &api::Vm| vm.uuid.as_ref() == Some(&domain.uuid) && vm.socket == device.socket;
            if vms.iter().any(is_vm) {
                return Ok(());
            }
            Default::default()
        }
    };
    IN_LOOK_UP.store(true, Ordering::Relaxed);
    let vm = Owner::find(options.owner.as_deref())
        .and_then(|owner| tmem_libvirt::vm_spec(domain, device, &cache, owner));
    IN_LOOK_UP.store(false, Ordering::Relaxed);
    let vm = vm?;
    match call(socket, |client| client.add_vm(vm.clone()).call()) {
        Ok(_) => Ok(()),
        Err(CallError::Refused(what)) if !device.socket.contains(&domain.uuid) => Err(format!(
            "{what}; if it is a copy of another domain, run tmemctl attach"
        )),
        Err(error) => Err(error.to_string()),
    }
}

/// Tells the daemon to stop serving a VM that has ended.
fn release(domain: &Domain, device: &Device, options: &Options) -> Result<(), String> {
    let (uuid, socket) = (&domain.uuid, &device.socket);
    let remove =
        |client: &mut api::VarlinkClient| client.remove_vm(uuid.clone(), socket.clone()).call();
    let removed = call(&options.socket, remove);
    removed.map(drop).map_err(|error| error.to_string())
}
