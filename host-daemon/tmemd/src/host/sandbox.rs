// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The sandbox limits an attacker who controls the process to the access that the daemon needs.
//!
//! - Landlock permits access to the configured files only. It forbids TCP and signals to other
//!   processes, and since Linux 7.1 also connections to sockets of other processes. On older
//!   kernels only the systemd unit hides these sockets, see `missing_protection`.
//! - seccomp permits to each kind of thread only the system calls that are listed in this file.
//!   Threads that access guests' data have the shortest list: they cannot open files, make
//!   connections or start threads. Threads that read messages of a VMM cannot do these things
//!   either.
//! - A daemon that runs as root keeps only three of root's capabilities.
//! - The process cannot gain rights by execve(2), which seccomp forbids anyway. Other processes of
//!   the daemon's user cannot trace the process, and it writes no core dump.
//!
//! A system call that is not permitted fails with EPERM, so that a library can continue without it.
//! A call that only an attack would make ends the process. seccomp does not see the operations of
//! an io_uring. Therefore each ring is restricted separately (`queue/uring.rs`), and serving
//! threads cannot create a ring.
//!
//! The sandbox covers the thread that enters it and all threads that it starts later, until the
//! process ends. `--no-sandbox` is for debuggers. Out of scope: paths that are not in the
//! configuration.

use crate::config::settings::Config;
use crate::memory::budget::MAP_COUNT_PATH;
use landlock::{
    ABI, Access as _, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, LandlockStatus,
    PathBeneath, PathFd, RestrictionStatus, Ruleset, RulesetAttr, RulesetCreatedAttr,
    RulesetStatus, Scope,
};
use libc::c_long;
use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, capability_is_in_bounding_set,
    remove_capability_from_bounding_set, set_capabilities,
};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule,
};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Newest Landlock ABI that this file uses. An older kernel enforces the part of the rules that it
/// supports.
const LANDLOCK: ABI = ABI::V9;

/// Directory of the journal's socket. The log sends each log line to that socket by its path.
const JOURNAL: &str = "/run/systemd/journal";

/// Capabilities that the daemon keeps. CAP_CHOWN lets it give sockets to the users of QEMUs and to
/// groups of operators, and CAP_FOWNER lets it set the sockets' modes afterwards. CAP_IPC_LOCK lets
/// it lock guests' pages in memory. The systemd unit grants only CAP_CHOWN and CAP_FOWNER, and
/// permits locking by a limit.
const CAPABILITIES: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::IPC_LOCK);

/// Kind of a thread. The sandbox permits different system calls to each kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThreadKind {
    /// Thread that creates resources at the daemon's start, such as io_urings, for other threads.
    Starting,
    /// Thread that serves control clients or watches the host.
    Serving,
    /// Thread that reads the vhost-user messages of one VMM.
    Connection,
    /// Thread that answers requests of guests, or works on the pool in the background.
    Data,
}

/// Seccomp filters, one for each kind of thread except [`ThreadKind::Starting`].
struct Filters {
    serving: BpfProgram,
    connection: BpfProgram,
    data: BpfProgram,
}

/// Seccomp filters of the process; empty until the process enters the sandbox.
static FILTERS: OnceLock<Filters> = OnceLock::new();

/// System calls that all kinds of threads may make: memory, waiting, time, exit, and log lines
/// through open descriptors.
const DATA_CALLS: &[c_long] = &[
    libc::SYS_brk,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_close,
    libc::SYS_epoll_pwait,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_epoll_wait,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_fcntl,
    libc::SYS_fdatasync,
    libc::SYS_fstat,
    libc::SYS_futex,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    // Workers count their page faults and context switches with getrusage(2), see host/usage.rs.
    libc::SYS_getrusage,
    libc::SYS_gettid,
    // The daemon interrupts guests with io_getevents(2) and io_submit(2), see queue/notifier.rs.
    libc::SYS_io_getevents,
    libc::SYS_io_submit,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_madvise,
    libc::SYS_membarrier,
    libc::SYS_mlock2,
    libc::SYS_mmap,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    libc::SYS_munlock,
    libc::SYS_munmap,
    libc::SYS_nanosleep,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    libc::SYS_read,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    // sendto(2) sends log lines to the journal, and replies to vhost-user messages. No thread may
    // call sendmsg(2), which could pass file descriptors: see vhost/reply.rs.
    libc::SYS_sendto,
    libc::SYS_set_robust_list,
    // The daemon ends a connection with shutdown(2) if a page of its memory was lost.
    libc::SYS_shutdown,
    libc::SYS_sigaltstack,
    // abort() ends the process with tgkill(2), which sends a signal to a thread of the daemon
    // itself.
    libc::SYS_tgkill,
    libc::SYS_write,
    libc::SYS_writev,
];

/// System calls that connection threads may make, but data threads may not. Connection threads read
/// from an open socket, receive files through it, and watch the eventfds with which guests kick.
const CONNECTION_CALLS: &[c_long] = &[
    libc::SYS_epoll_ctl,
    libc::SYS_fstatfs,
    // The daemon reads the type of a descriptor from /proc/self/fd with readlink(2).
    #[cfg(target_arch = "x86_64")]
    libc::SYS_readlink,
    libc::SYS_readlinkat,
    libc::SYS_recvmsg,
];

/// System calls that serving threads (such as the acceptor) may make, but connection threads may
/// not: for files, sockets and threads.
const SERVING_CALLS: &[c_long] = &[
    libc::SYS_accept4,
    libc::SYS_bind,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_chmod,
    libc::SYS_clone3,
    libc::SYS_connect,
    libc::SYS_dup,
    libc::SYS_epoll_create1,
    libc::SYS_eventfd2,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fchownat,
    libc::SYS_fsync,
    libc::SYS_ftruncate,
    libc::SYS_getdents64,
    libc::SYS_getegid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getpeername,
    libc::SYS_getsockname,
    libc::SYS_getsockopt,
    libc::SYS_getuid,
    libc::SYS_listen,
    libc::SYS_lseek,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_lstat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_mkdir,
    libc::SYS_mkdirat,
    libc::SYS_mlock,
    libc::SYS_newfstatat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_open,
    libc::SYS_openat,
    libc::SYS_pipe2,
    libc::SYS_prctl,
    libc::SYS_prlimit64,
    libc::SYS_recvfrom,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_rename,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_seccomp,
    libc::SYS_setsockopt,
    libc::SYS_socket,
    libc::SYS_socketpair,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_stat,
    libc::SYS_statx,
    libc::SYS_sysinfo,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    libc::SYS_uname,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_unlink,
    libc::SYS_unlinkat,
];

/// System calls that threads may make only during the start. They create io_urings and the AIO
/// context of queue/notifier.rs. seccomp does not see the operations of a ring, so rings are
/// created and restricted before the daemon serves.
const STARTING_CALLS: &[c_long] = &[libc::SYS_io_setup, libc::SYS_io_uring_setup];

/// System calls that no part of the daemon ever makes. If a thread makes one, the kernel ends the
/// process.
const ATTACKS: &[c_long] = &[
    libc::SYS_bpf,
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_finit_module,
    libc::SYS_init_module,
    libc::SYS_kexec_load,
    libc::SYS_mount,
    libc::SYS_open_by_handle_at,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_ptrace,
    libc::SYS_setns,
    libc::SYS_unshare,
    libc::SYS_userfaultfd,
];

/// Enters the sandbox. Logs which protections the kernel lacks.
///
/// # Errors
/// A path of the configuration does not exist, or a system call fails.
pub fn enter(config: &Config, file: &Path) -> io::Result<()> {
    // rustix reads and caches the page size here, before the filters are applied. Otherwise a
    // connection thread would read it first, with system calls that its filter forbids. Before
    // Linux 6.4, rustix reads /proc/self/auxv, which belongs to root as soon as the process is not
    // dumpable.
    rustix::param::page_size();
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    drop_capabilities()?;
    let ruled = restrict_files(config, file)?;
    match missing_protection(&ruled.ruleset, ruled.landlock) {
        None => {}
        Some(LogLine::Info(text)) => tracing::info!("{text}"),
        Some(LogLine::Warning(text)) => tracing::warn!("{text}"),
    }
    for filter in [filter(ThreadKind::Starting)?, no_clone3()?, attacks()?] {
        // `apply_filter` also sets no_new_privs. If a thread has several filters, the kernel obeys
        // the strictest one.
        seccompiler::apply_filter(&filter).map_err(io::Error::other)?;
    }
    // Only the first call of `enter` stores its filters, because the process has one sandbox.
    let _ = FILTERS.set(Filters {
        serving: filter(ThreadKind::Serving)?,
        connection: filter(ThreadKind::Connection)?,
        data: filter(ThreadKind::Data)?,
    });
    Ok(())
}

/// Restricts the calling thread, and the threads that it starts later, to the system calls that
/// threads of this kind may make. The call does nothing if the process has not entered the sandbox.
/// Each thread must make the call itself, because seccomp cannot apply one filter to all threads of
/// a process once their filters differ.
///
/// # Panics
/// The kernel refuses the filter, although it has accepted a filter that allows more calls.
pub fn narrow(kind: ThreadKind) {
    let Some(filters) = FILTERS.get() else {
        return;
    };
    let filter = match kind {
        // A thread of kind Starting gets no further filter. It keeps the filter that the whole
        // process got when it entered the sandbox.
        ThreadKind::Starting => return,
        ThreadKind::Serving => &filters.serving,
        ThreadKind::Connection => &filters.connection,
        ThreadKind::Data => &filters.data,
    };
    seccompiler::apply_filter(filter)
        .expect("the kernel refused a filter, although it accepted one before");
}

/// Log line about a protection that the kernel lacks, with its level.
#[derive(Debug, PartialEq, Eq)]
enum LogLine {
    Info(&'static str),
    Warning(&'static str),
}

/// Returns the log line about protections that the kernel lacks; None if the kernel enforces all of
/// them.
fn missing_protection(ruleset: &RulesetStatus, landlock: LandlockStatus) -> Option<LogLine> {
    match (ruleset, landlock) {
        (RulesetStatus::FullyEnforced, _) => None,
        // Landlock ABI 6 to 8 lacks several restrictions. Of these, the daemon needs only the
        // restriction on connections to sockets.
        (
            RulesetStatus::PartiallyEnforced,
            LandlockStatus::Available {
                effective_abi: ABI::V6 | ABI::V7 | ABI::V8,
                ..
            },
        ) => Some(LogLine::Info(
            "the Landlock of this kernel cannot block connections to sockets of other services, \
             which needs Linux 7.1. The systemd unit hides these sockets. A daemon started by \
             hand may connect to all sockets that its user may use",
        )),
        _ => Some(LogLine::Warning(
            "this kernel's Landlock does not confine the daemon in full: it is older than 6.12, \
             or was booted without lsm=landlock",
        )),
    }
}

/// Drops all capabilities except [`CAPABILITIES`] from the calling thread and the threads that it
/// starts later.
fn drop_capabilities() -> io::Result<()> {
    let has = capabilities(None)?;
    // Without CAP_SETPCAP, a process cannot reduce its bounding set of capabilities. That set only
    // matters for a process that executes programs, which the daemon does not.
    if has.effective.contains(CapabilitySet::SETPCAP) {
        for capability in (0..u64::BITS).map(|bit| CapabilitySet::from_bits_retain(1 << bit)) {
            // If the query fails, the kernel does not know a capability with this number.
            let is_there = capability_is_in_bounding_set(capability).unwrap_or(false);
            if is_there && !CAPABILITIES.contains(capability) {
                remove_capability_from_bounding_set(capability)?;
            }
        }
    }
    // Clearing the inheritable set also clears the ambient set of capabilities.
    set_capabilities(
        None,
        CapabilitySets {
            effective: has.permitted & CAPABILITIES,
            permitted: has.permitted & CAPABILITIES,
            inheritable: CapabilitySet::empty(),
        },
    )?;
    Ok(())
}

/// Creates a rule that permits a system call if its argument `number`, limited to the bits of
/// `mask`, equals `value`.
fn argument(number: u8, mask: i32, value: i32) -> io::Result<SeccompRule> {
    let mask = SeccompCmpOp::MaskedEq(mask as u64);
    SeccompCondition::new(number, SeccompCmpArgLen::Dword, mask, value as u64)
        .and_then(|condition| SeccompRule::new(vec![condition]))
        .map_err(io::Error::other)
}

fn compile(
    rules: BTreeMap<c_long, Vec<SeccompRule>>,
    otherwise: SeccompAction,
    action: SeccompAction,
) -> io::Result<BpfProgram> {
    let arch = std::env::consts::ARCH
        .try_into()
        .map_err(io::Error::other)?;
    SeccompFilter::new(rules, otherwise, action, arch)
        .and_then(BpfProgram::try_from)
        .map_err(io::Error::other)
}

fn filter(kind: ThreadKind) -> io::Result<BpfProgram> {
    // A thread of each kind may make the calls of its own list and of all lists after that list.
    let lists = [STARTING_CALLS, SERVING_CALLS, CONNECTION_CALLS, DATA_CALLS];
    let own = match kind {
        ThreadKind::Starting => &lists[..],
        ThreadKind::Serving => &lists[1..],
        ThreadKind::Connection => &lists[2..],
        ThreadKind::Data => &lists[3..],
    };
    let calls = own.iter().copied().flatten();
    let mut rules: BTreeMap<_, _> = calls.map(|&call| (call, Vec::new())).collect();
    // No thread may map memory as executable or make it executable.
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        rules.insert(call, vec![argument(2, libc::PROT_EXEC, 0)?]);
    }
    if matches!(kind, ThreadKind::Starting | ThreadKind::Serving) {
        let thread = libc::CLONE_THREAD | libc::CLONE_VM;
        rules.insert(libc::SYS_clone, vec![argument(0, thread, thread)?]);
        rules.insert(libc::SYS_socket, vec![argument(0, -1, libc::AF_UNIX)?]);
        // The standard library makes sockets nonblocking with the ioctl FIONBIO, so this ioctl is
        // permitted.
        rules.insert(
            libc::SYS_ioctl,
            vec![argument(1, -1, libc::FIONBIO as i32)?],
        );
    }
    let refuse = SeccompAction::Errno(libc::EPERM as u32);
    compile(rules, refuse, SeccompAction::Allow)
}

/// Creates a filter that makes clone3(2) appear missing. Threads then start with clone(2), whose
/// flags a filter sees.
fn no_clone3() -> io::Result<BpfProgram> {
    let rules = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
    let unknown = SeccompAction::Errno(libc::ENOSYS as u32);
    compile(rules, SeccompAction::Allow, unknown)
}

fn attacks() -> io::Result<BpfProgram> {
    let rules = ATTACKS.iter().map(|&call| (call, Vec::new())).collect();
    compile(rules, SeccompAction::Allow, SeccompAction::KillProcess)
}

fn restrict_files(config: &Config, file: &Path) -> io::Result<RestrictionStatus> {
    rules(config, file).map_err(|error| {
        io::Error::other(format!(
            "the daemon cannot be confined to its files: {error}"
        ))
    })
}

fn rules(config: &Config, file: &Path) -> Result<RestrictionStatus, landlock::RulesetError> {
    let read = AccessFs::ReadFile | AccessFs::ReadDir;
    let write = read | AccessFs::WriteFile;
    let all = write
        | AccessFs::MakeReg
        | AccessFs::MakeDir
        | AccessFs::MakeSock
        | AccessFs::RemoveFile
        // If a socket already exists at a configured path, the daemon connects to the socket, to
        // find out whether a process listens there.
        | AccessFs::ResolveUnix
        | AccessFs::Truncate;
    let parent = |path: &Path| path.parent().unwrap_or(Path::new("/")).to_path_buf();
    let mut paths: Vec<(PathBuf, BitFlags<AccessFs>)> = vec![
        ("/dev/null".into(), AccessFs::ReadFile.into()),
        ("/proc/self".into(), read),
        ("/proc/meminfo".into(), AccessFs::ReadFile.into()),
        (MAP_COUNT_PATH.into(), AccessFs::ReadFile.into()),
        ("/proc/pressure".into(), write),
        ("/sys/devices/system/cpu".into(), read),
        ("/sys/fs/cgroup".into(), read),
        (JOURNAL.into(), AccessFs::ResolveUnix.into()),
        // The rule permits the directory that contains the configuration file, because an editor
        // may save the file by replacing it with a new one.
        (parent(file), read),
        (config.run_directory.clone(), all),
        (parent(&config.control), all),
    ];
    paths.extend(
        config
            .control_read_only
            .iter()
            .map(|path| (parent(path), all)),
    );
    paths.extend(config.vms.iter().map(|vm| (parent(&vm.socket), all)));
    let trace = config.trace.iter();
    paths.extend(trace.map(|trace| (parent(&trace.path), AccessFs::MakeReg | AccessFs::WriteFile)));
    if let Some(pressure) = &config.pressure {
        paths.push((pressure.meminfo.clone(), AccessFs::ReadFile.into()));
        paths.push((pressure.arcstats.clone(), AccessFs::ReadFile.into()));
        let stalls = pressure.stalls.iter();
        paths.extend(stalls.map(|path| (path.clone(), AccessFs::ReadFile | AccessFs::WriteFile)));
    }
    // The environment variable NOTIFY_SOCKET names the socket of the service manager, which may be
    // an abstract socket without a path.
    let manager = std::env::var_os("NOTIFY_SOCKET").map(PathBuf::from);
    let manager = manager.filter(|path| path.is_absolute());
    paths.extend(manager.map(|path| (path, AccessFs::ResolveUnix.into())));
    let mut ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(LANDLOCK))?
        .handle_access(AccessNet::from_all(LANDLOCK))?
        // Connections to abstract sockets stay permitted, because a service manager may listen on
        // one.
        .scope(Scope::Signal)?
        .create()?;
    for (path, access) in paths {
        // A path that does not exist gets no rule. The code that uses the path reports later that
        // it is missing.
        let Ok(fd) = PathFd::new(&path) else { continue };
        let access = match path.is_dir() {
            true => access,
            false => access & AccessFs::from_file(LANDLOCK),
        };
        ruleset = ruleset.add_rule(PathBeneath::new(fd, access))?;
    }
    ruleset.restrict_self()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::settings::EventLoop;
    use crate::queue::event_loop;
    use crate::util::event_fd::signal;
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::io::Errno;
    use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect};
    use rustix::net::{AddressFamily, SocketType, socket};
    use std::fs;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Command, Output};
    use std::sync::Arc;
    use tmem_model::{Missing, skipped};
    use vmm_sys_util::sock_ctrl_msg::ScmSocket;

    fn config(run_directory: &Path) -> Config {
        Config {
            control_read_only: None,
            ..Config::for_test(run_directory, &[])
        }
    }

    /// Runs `what` in a new thread that enters the sandbox as the given kind. Other threads of the
    /// test's process stay outside the sandbox.
    fn inside<R: Send>(kind: ThreadKind, what: impl FnOnce(&Path) -> R + Send) -> R {
        let directory = tempfile::tempdir().expect("cannot create a temporary directory");
        inside_at(directory.path(), kind, what)
    }

    /// Runs `what` in a new thread that enters the sandbox as the given kind. The configuration of
    /// the sandbox contains the directory `at`.
    fn inside_at<R: Send>(at: &Path, kind: ThreadKind, what: impl FnOnce(&Path) -> R + Send) -> R {
        fs::write(at.join("tmemd.toml"), "").expect("cannot write the file");
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                enter(&config(at), &at.join("tmemd.toml")).expect("cannot enter the sandbox");
                narrow(kind);
                what(at)
            });
            thread.join().expect("the thread in the sandbox panicked")
        })
    }

    /// Runs a test that is marked as ignored in a process of its own. Returns the output of that
    /// process.
    fn in_a_process(name: &str) -> Output {
        let own = std::env::current_exe().expect("cannot find the program of this test");
        let test = format!("host::sandbox::tests::{name}");
        let mut command = Command::new(own);
        let output = command.args(["--ignored", "--exact", &test]).output();
        output.expect("cannot run the test program")
    }

    #[test]
    fn sandboxed_threads_open_only_configured_files() {
        let other = tempfile::tempdir().expect("cannot create a temporary directory");
        let denied = |result: io::Result<()>| {
            let error = result
                .expect_err("the sandbox let a thread open a file outside of the configuration");
            assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
        };
        inside(ThreadKind::Serving, |own| {
            denied(fs::read("/etc/passwd").map(drop));
            denied(fs::read_dir("/etc").map(drop));
            denied(fs::write(other.path().join("new"), ""));
            denied(fs::create_dir(other.path().join("new")));
            fs::write(own.join("note"), "kept").expect("cannot write a file in the run directory");
            fs::rename(own.join("note"), own.join("vm"))
                .expect("cannot rename a file in the run directory");
            assert_eq!(
                fs::read(own.join("vm")).expect("cannot read a file in the run directory"),
                b"kept"
            );
            fs::remove_file(own.join("vm")).expect("cannot remove a file in the run directory");
            fs::read("/proc/self/stat").expect("cannot read the daemon's own status");
            fs::read("/proc/meminfo").expect("cannot read the host's memory statistics");
        });
    }

    #[test]
    fn unneeded_system_calls_are_refused() {
        inside(ThreadKind::Serving, |_| {
            let tcp = socket(AddressFamily::INET, SocketType::STREAM, None);
            assert_eq!(
                tcp.expect_err("the sandbox let a thread create a TCP socket"),
                Errno::PERM
            );
            socket(AddressFamily::UNIX, SocketType::STREAM, None)
                .expect("cannot create a Unix socket");
            std::thread::spawn(|| ())
                .join()
                .expect("cannot create a thread");
            let (read, write) = (ProtFlags::READ, ProtFlags::WRITE);
            let map = |prot| {
                // SAFETY: the mapping is new, and no other code uses it.
                unsafe { mmap_anonymous(std::ptr::null_mut(), 4096, prot, MapFlags::PRIVATE) }
            };
            assert_eq!(
                map(read | ProtFlags::EXEC)
                    .expect_err("the sandbox let a thread map executable memory"),
                Errno::PERM
            );
            let page = map(read | write).expect("cannot map memory");
            // SAFETY: the page was just mapped, and no other code uses it.
            let done = unsafe { mprotect(page, 4096, MprotectFlags::READ | MprotectFlags::EXEC) };
            assert_eq!(
                done.expect_err("the sandbox let a thread make memory executable"),
                Errno::PERM
            );
            // SAFETY: no code uses the page any more.
            unsafe { rustix::mm::munmap(page, 4096) }.expect("cannot unmap the page");
            // SAFETY: the call is equivalent to fork(2), because its flags do not create a thread.
            // The kernel must refuse it. If it does not, the child only exits.
            let child = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) };
            if child == 0 {
                // SAFETY: this code runs in the child process, which exists only if the kernel did
                // not refuse the call. The child may use nothing of its parent.
                unsafe { libc::_exit(1) };
            }
            assert_eq!(
                child, -1,
                "the kernel let a sandboxed thread create a process"
            );
        });
    }

    #[test]
    fn data_threads_cannot_open_files() {
        opens_nothing(ThreadKind::Data);
    }

    #[test]
    fn connection_threads_cannot_open_files() {
        opens_nothing(ThreadKind::Connection);
    }

    const KINDS: [ThreadKind; 4] = [
        ThreadKind::Starting,
        ThreadKind::Serving,
        ThreadKind::Connection,
        ThreadKind::Data,
    ];

    #[test]
    fn no_thread_can_pass_descriptors() {
        let (left, right) = UnixStream::pair().expect("cannot create a socket pair");
        for kind in KINDS {
            inside(kind, |_| {
                let passed = left.send_with_fd(&b"x"[..], right.as_raw_fd());
                let errno = passed
                    .expect_err("the sandbox let a thread pass a descriptor")
                    .errno();
                assert_eq!(
                    errno,
                    libc::EPERM,
                    "a thread of kind {kind:?} did not get EPERM for passing a descriptor"
                );
                // The vhost crate sends its replies with send_with_fds(), which calls the C
                // function sendmsg().
                let sent = left.send_with_fds(&[&b"re"[..], &b"ply"[..]], &[]);
                assert_eq!(
                    sent.expect("the thread cannot send a reply that carries no descriptors"),
                    5,
                    "a thread of kind {kind:?} sent a reply of the wrong length"
                );
            });
        }
    }

    /// tracing-journald sends each log line through a socket that is already open, to the path of
    /// the journal's socket.
    #[test]
    fn every_thread_can_write_to_the_journal() {
        let directory = tempfile::tempdir().expect("cannot create a temporary directory");
        let path = directory.path().join("socket");
        let journal = UnixDatagram::bind(&path).expect("cannot bind the socket");
        let socket = UnixDatagram::unbound().expect("cannot create a Unix socket");
        for kind in KINDS {
            inside_at(directory.path(), kind, |_| {
                socket
                    .send_to(b"MESSAGE=x", &path)
                    .expect("the thread cannot write to the journal");
            });
            let mut line = [0; 16];
            assert_eq!(
                journal
                    .recv(&mut line)
                    .expect("the journal's socket received nothing"),
                9,
                "the line of a thread of kind {kind:?} has the wrong length"
            );
        }
    }

    fn opens_nothing(kind: ThreadKind) {
        let (left, right) = UnixDatagram::pair().expect("cannot create a socket pair");
        inside(kind, |own| {
            let error =
                fs::read(own.join("tmemd.toml")).expect_err("the sandbox let a thread open a file");
            assert_eq!(error.raw_os_error(), Some(libc::EPERM));
            let local = socket(AddressFamily::UNIX, SocketType::STREAM, None);
            assert_eq!(
                local.expect_err("the sandbox let a thread create a socket"),
                Errno::PERM
            );
            // connect(2) also fails for a socket that the test created before the thread entered
            // the sandbox.
            let error = left
                .connect(own.join("any"))
                .expect_err("the sandbox let a thread connect an open socket");
            assert_eq!(error.raw_os_error(), Some(libc::EPERM));
            right
                .send(b"what is there")
                .expect("the thread cannot send through an open socket");
            let thread = std::thread::Builder::new().spawn(|| ());
            assert!(
                thread.is_err(),
                "the kernel let a sandboxed thread create a thread"
            );
        });
    }

    /// Tries to create an io_uring and an AIO context. Returns the results of both attempts.
    fn contexts() -> [io::Result<()>; 2] {
        let made = |made: c_long| match made {
            -1 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        };
        // The array stands for a `struct io_uring_params` without flags.
        let mut parameters = [0u64; 15];
        let mut context: libc::c_ulong = 0;
        // SAFETY: the kernel reads and writes the parameters and returns a new descriptor. The ring
        // has one entry.
        let ring = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, parameters.as_mut_ptr()) };
        let ring = made(ring);
        // SAFETY: the kernel writes the number of the new AIO context to `context`.
        let aio = made(unsafe { libc::syscall(libc::SYS_io_setup, 1, &mut context) });
        [ring, aio]
    }

    fn refused(contexts: [io::Result<()>; 2]) {
        for (what, made) in ["io_uring_setup", "io_setup"].iter().zip(contexts) {
            let Err(error) = made else {
                panic!("{what} succeeded in a thread that must not create contexts");
            };
            assert_eq!(error.raw_os_error(), Some(libc::EPERM));
        }
    }

    /// Serving threads must not create an io_uring. seccomp does not see the operations of a ring,
    /// and a new ring would accept all of them.
    #[test]
    fn serving_threads_cannot_create_io_uring_or_aio_contexts() {
        if let [Err(error), _] | [_, Err(error)] = contexts() {
            return skipped(Missing::IoUring, error);
        }
        inside(ThreadKind::Starting, |_| {
            for (what, made) in ["io_uring_setup", "io_setup"].iter().zip(contexts()) {
                made.unwrap_or_else(|error| {
                    panic!("{what} was refused to a starting thread: {error}")
                });
            }
        });
        inside(ThreadKind::Serving, |_| {
            refused(contexts());
            // The acceptor thread is a serving thread. The threads of connections that it starts
            // inherit its restrictions.
            let later = std::thread::spawn(|| {
                refused(contexts());
                narrow(ThreadKind::Connection);
                refused(contexts());
            });
            later.join().expect("the thread in the sandbox panicked");
        });
        inside(ThreadKind::Data, |_| refused(contexts()));
    }

    #[test]
    #[ignore = "runs in the child process of a_started_daemon_cannot_create_io_uring_or_aio_contexts"]
    fn child_process_starts_a_daemon_and_tries_to_create_contexts() {
        inside(ThreadKind::Starting, |own| {
            let daemon = crate::Daemon::start(config(own)).expect("cannot start the daemon");
            refused(contexts());
            daemon.stop();
        });
    }

    #[test]
    fn a_started_daemon_cannot_create_io_uring_or_aio_contexts() {
        let output = in_a_process("child_process_starts_a_daemon_and_tries_to_create_contexts");
        assert!(
            output.status.success(),
            "the child process that starts a daemon failed: {output:?}"
        );
    }

    /// A container may refuse io_uring to all processes. This test simulates that with the sandbox,
    /// because the sandbox refuses io_uring to serving threads.
    #[test]
    fn workers_use_epoll_where_io_uring_is_refused() {
        inside(ThreadKind::Serving, |_| {
            let error = event_loop::create(EventLoop::IoUring, 1)
                .err()
                .expect("an io_uring context was created although io_uring is refused");
            let said = error.to_string();
            assert!(
                said.contains("\"auto\" takes epoll instead"),
                "the error does not name the alternative: {said}"
            );
            let pollers = event_loop::create(EventLoop::Auto, 2)
                .expect("\"auto\" did not fall back to epoll");
            assert_eq!(pollers.len(), 2);
            let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
            for poller in pollers {
                let kick = Arc::new(eventfd(0, flags).expect("cannot create an eventfd"));
                poller.add(&kick, 7).expect("cannot watch the eventfd");
                signal(&kick);
                let mut ready = Vec::new();
                poller
                    .wait(&mut ready, true)
                    .expect("cannot wait for descriptors");
                assert_eq!(ready, [7]);
            }
        });
    }

    /// For each Landlock version that lacks a protection, the log line names the missing
    /// protection.
    #[test]
    fn partial_or_missing_landlock_is_logged() {
        let on = |effective_abi| LandlockStatus::Available {
            effective_abi,
            kernel_abi: None,
        };
        let (full, part) = (
            RulesetStatus::FullyEnforced,
            RulesetStatus::PartiallyEnforced,
        );
        let none = RulesetStatus::NotEnforced;
        assert_eq!(missing_protection(&full, on(ABI::V9)), None);
        for abi in [ABI::V6, ABI::V7, ABI::V8] {
            let missing_protection = missing_protection(&part, on(abi))
                .expect("a kernel without Landlock rules for sockets was not reported");
            let LogLine::Info(text) = missing_protection else {
                panic!(
                    "ABI {abi:?}: the missing protection of sockets is not logged as information: \
                     {missing_protection:?}"
                );
            };
            assert!(
                text.contains("sockets") && text.contains("7.1"),
                "the warning does not name sockets and the kernel version: {text}"
            );
        }
        for (ruleset, landlock) in [
            (&part, on(ABI::V5)),
            (&part, on(ABI::V1)),
            (&none, LandlockStatus::NotEnabled),
            (&none, LandlockStatus::NotImplemented),
        ] {
            let missing_protection = missing_protection(ruleset, landlock)
                .expect("a kernel without full Landlock was not reported");
            let LogLine::Warning(text) = missing_protection else {
                panic!(
                    "{landlock:?}: the missing protection is not logged as a warning: \
                     {missing_protection:?}"
                );
            };
            assert!(
                text.contains("lsm=landlock"),
                "the warning does not name the remedy: {text}"
            );
        }
    }

    /// In the sandbox, connect(2) reaches only sockets in the configured directories, whatever the
    /// modes of other sockets permit.
    #[test]
    fn the_sandbox_refuses_connections_to_unconfigured_sockets() {
        let other = tempfile::tempdir().expect("cannot create a temporary directory");
        let theirs = other.path().join("bus");
        let _listener = UnixListener::bind(&theirs).expect("cannot bind the socket");
        // A separate thread applies the Landlock rules, because a thread cannot remove rules that
        // apply to itself.
        let ruled = std::thread::spawn(|| rules(&config(Path::new("/")), Path::new("/none")));
        let abi = match ruled
            .join()
            .expect("the thread in the sandbox panicked")
            .expect("cannot apply the Landlock rules")
            .landlock
        {
            LandlockStatus::Available { effective_abi, .. } => effective_abi,
            _ => ABI::Unsupported,
        };
        inside(ThreadKind::Serving, |own| {
            let mine = own.join("own");
            let _listener =
                UnixListener::bind(&mine).expect("cannot bind a socket in the run directory");
            UnixStream::connect(&mine).expect("cannot connect to a socket in the run directory");
            let connected = UnixStream::connect(&theirs);
            match abi {
                ABI::V9 => {
                    let error = connected.expect_err(
                        "a socket outside of the configuration accepted the connection",
                    );
                    assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
                }
                // Landlock before Linux 7.1 cannot forbid connections to sockets of other
                // processes. docs/threat-model.md describes this remaining risk.
                _ => drop(
                    connected
                        .expect("the connection was refused without Landlock rules for sockets"),
                ),
            }
        });
        if abi != ABI::V9 {
            skipped(
                Missing::LandlockSockets,
                format_args!("its Landlock is {abi:?}"),
            );
        }
    }

    #[test]
    #[ignore = "runs in the child process of executing_a_program_in_the_sandbox_ends_the_process"]
    fn child_process_executes_a_program_in_the_sandbox() {
        inside(ThreadKind::Serving, |_| {
            let arguments = [std::ptr::null::<libc::c_char>()];
            // SAFETY: the arguments are a name that ends with 0 and an empty list. The call fails
            // or does not return.
            unsafe { libc::execv(c"/bin/true".as_ptr(), arguments.as_ptr()) };
        });
    }

    #[test]
    fn executing_a_program_in_the_sandbox_ends_the_process() {
        let output = in_a_process("child_process_executes_a_program_in_the_sandbox");
        assert_eq!(
            output.status.signal(),
            Some(libc::SIGSYS),
            "the process that executes a program was not killed by SIGSYS: {output:?}"
        );
    }
}
