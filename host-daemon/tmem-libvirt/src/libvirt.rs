// SPDX-License-Identifier: Apache-2.0 OR MIT
//! libvirt, read only: which domains run, their XML, and events of what happened to which.
//!
//! An event only says where to look: what it is about may have changed again. Never here: what a
//! domain's XML means.

use std::ffi::{c_int, c_void};
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, Sender, channel};
use virt::connect::Connect;
use virt::domain::Domain;
use virt::error::{Error, ErrorNumber};
use virt_sys as sys;

/// Something happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// To the domain of this UUID.
    Domain(String),
    /// To the connection of this number: it ended.
    Closed(usize),
}

/// What libvirt says of a domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It runs.
    Runs,
    /// libvirt knows it, and it does not run.
    Stopped,
    /// libvirt does not know it: it was transient, or undefined, or never libvirt's.
    Unknown,
}

/// libvirt asks a server that says nothing whether it is there, this often, in seconds, and gives it up
/// after so many questions: a server that hangs is noticed like one that ended.
const KEEPALIVE: (c_int, u32) = (5, 3);

/// Where libvirt's callbacks put what happened. They cannot be given a Rust value that outlives all
/// connections otherwise.
static EVENTS: OnceLock<Sender<Event>> = OnceLock::new();

fn tell(event: Event) {
    if let Some(events) = EVENTS.get() {
        // Nobody listens at the end of the process.
        let _ = events.send(event);
    }
}

fn last_error() -> String {
    Error::last_error().message().into()
}

/// Starts libvirt's event loop, in a thread of its own; before any connection.
///
/// # Errors
/// libvirt's library refuses, or the system has no thread.
pub fn start_events() -> Result<Receiver<Event>, String> {
    let (sender, receiver) = channel();
    if EVENTS.set(sender).is_err() {
        return Err("a bug: the event loop runs already".into());
    }
    // libvirt would print each error as well.
    virt::error::clear_error_callback();
    // SAFETY: no connection was opened yet, which is all that this asks for.
    if unsafe { sys::virEventRegisterDefaultImpl() } < 0 {
        return Err(format!("libvirt's event loop: {}", last_error()));
    }
    let run = || {
        loop {
            // SAFETY: the implementation is registered, and only this thread runs it.
            if unsafe { sys::virEventRunDefaultImpl() } < 0 {
                tracing::error!("libvirt's event loop: {}", last_error());
                std::thread::sleep(std::time::Duration::from_secs(1));
            }
        }
    };
    let thread = std::thread::Builder::new().name("events".into()).spawn(run);
    thread.map_err(|error| format!("no thread for libvirt's events: {error}"))?;
    Ok(receiver)
}

/// Tells of the domain. `domain` must be one of libvirt's, which it is in a callback.
unsafe fn happened(domain: sys::virDomainPtr) {
    let mut uuid = [0; sys::VIR_UUID_STRING_BUFLEN as usize];
    // SAFETY: the domain is alive during the callback, and the buffer has the length that is asked
    // for.
    if unsafe { sys::virDomainGetUUIDString(domain, uuid.as_mut_ptr()) } < 0 {
        return;
    }
    let bytes: Vec<u8> = uuid
        .iter()
        .map(|byte| *byte as u8)
        .take_while(|byte| *byte != 0)
        .collect();
    tell(Event::Domain(String::from_utf8_lossy(&bytes).into_owned()));
}

/// libvirt's virConnectDomainEventCallback.
unsafe extern "C" fn lifecycle(
    _connection: sys::virConnectPtr,
    domain: sys::virDomainPtr,
    _event: c_int,
    _detail: c_int,
    _opaque: *mut c_void,
) -> c_int {
    // SAFETY: libvirt gives a domain of its own.
    unsafe { happened(domain) };
    0
}

/// libvirt's virConnectDomainEventMetadataChangeCallback.
unsafe extern "C" fn metadata(
    _connection: sys::virConnectPtr,
    domain: sys::virDomainPtr,
    _kind: c_int,
    _namespace: *const std::ffi::c_char,
    _opaque: *mut c_void,
) {
    // SAFETY: libvirt gives a domain of its own.
    unsafe { happened(domain) };
}

/// libvirt's virConnectCloseFunc; `opaque` is the connection's number, never followed.
unsafe extern "C" fn closed(_connection: sys::virConnectPtr, _reason: c_int, opaque: *mut c_void) {
    tell(Event::Closed(opaque as usize));
}

/// A connection.
pub struct Connection {
    connect: Connect,
    callbacks: Vec<c_int>,
}

impl Connection {
    /// Connects, and has events sent from now on; they tell the number of a connection that ends.
    ///
    /// # Errors
    /// libvirt is not there, or does not tell of events.
    pub fn open(uri: &str, number: usize) -> Result<Connection, String> {
        let connect = Connect::open_read_only(Some(uri)).map_err(|e| e.message().to_string())?;
        let mut connection = Connection {
            connect,
            callbacks: Vec::new(),
        };
        let raw = connection.connect.as_ptr();
        let opaque = number as *mut c_void;
        let register = sys::virConnectRegisterCloseCallback;
        // SAFETY: the connection is open, the callback has libvirt's type, and its opaque value is a
        // number that needs no freeing.
        let watched = unsafe { register(raw, Some(closed), opaque, None) };
        if watched < 0 {
            return Err(last_error());
        }
        // Not all transports can: then only the end of the connection is noticed.
        // SAFETY: the connection is open.
        if unsafe { sys::virConnectSetKeepAlive(raw, KEEPALIVE.0, KEEPALIVE.1) } < 0 {
            tracing::warn!(
                "libvirt cannot be asked whether it is there: {}",
                last_error()
            );
        }
        type Generic = unsafe extern "C" fn(sys::virConnectPtr, sys::virDomainPtr, *mut c_void);
        // SAFETY: VIR_DOMAIN_EVENT_CALLBACK of libvirt.h: callbacks are registered as the generic type
        // and called as the type of their event, which these two have.
        let generic: [(_, Generic); 2] = unsafe {
            [
                (
                    sys::VIR_DOMAIN_EVENT_ID_LIFECYCLE,
                    std::mem::transmute::<*const (), Generic>(lifecycle as *const ()),
                ),
                (
                    sys::VIR_DOMAIN_EVENT_ID_METADATA_CHANGE,
                    std::mem::transmute::<*const (), Generic>(metadata as *const ()),
                ),
            ]
        };
        for (event, callback) in generic {
            let (all, nothing) = (std::ptr::null_mut(), std::ptr::null_mut());
            let event = event as c_int;
            // SAFETY: the connection is open; no domain means all; there is nothing to free.
            let id = unsafe {
                sys::virConnectDomainEventRegisterAny(
                    raw,
                    all,
                    event,
                    Some(callback),
                    nothing,
                    None,
                )
            };
            if id < 0 {
                return Err(last_error());
            }
            connection.callbacks.push(id);
        }
        Ok(connection)
    }

    /// UUIDs of the domains that run.
    ///
    /// # Errors
    /// libvirt is away.
    pub fn all_running(&self) -> Result<Vec<String>, String> {
        let domains = self
            .connect
            .list_all_domains(sys::VIR_CONNECT_LIST_DOMAINS_ACTIVE);
        let domains = domains.map_err(|e| e.message().to_string())?;
        let uuids = domains.iter().map(Domain::get_uuid_string);
        uuids
            .collect::<Result<_, _>>()
            .map_err(|e| e.message().to_string())
    }

    fn find(&self, uuid: &str) -> Result<Option<Domain>, String> {
        match Domain::lookup_by_uuid_string(&self.connect, uuid) {
            Ok(domain) => Ok(Some(domain)),
            Err(error) => gone(&error),
        }
    }

    /// The XML of a domain, if it runs.
    ///
    /// # Errors
    /// libvirt is away.
    pub fn running(&self, uuid: &str) -> Result<Option<String>, String> {
        let Some(domain) = self.find(uuid)? else {
            return Ok(None);
        };
        let xml = domain.is_active().and_then(|active| match active {
            true => domain.get_xml_desc(0).map(Some),
            false => Ok(None),
        });
        xml.or_else(|error| gone(&error))
    }

    /// Whether a domain runs.
    ///
    /// # Errors
    /// libvirt is away.
    pub fn state(&self, uuid: &str) -> Result<State, String> {
        let Some(domain) = self.find(uuid)? else {
            return Ok(State::Unknown);
        };
        match domain.is_active() {
            Ok(true) => Ok(State::Runs),
            Ok(false) => Ok(State::Stopped),
            Err(error) => gone(&error).map(|_: Option<()>| State::Unknown),
        }
    }
}

/// A domain that is no longer there is no trouble with libvirt.
fn gone<T>(error: &Error) -> Result<Option<T>, String> {
    match error.code() {
        ErrorNumber::NoDomain => Ok(None),
        _ => Err(error.message().into()),
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let raw = self.connect.as_ptr();
        for id in &self.callbacks {
            // SAFETY: the connection is not closed yet, and the callback was registered with it. That
            // the server is gone is no harm.
            unsafe { sys::virConnectDomainEventDeregisterAny(raw, *id) };
        }
        // SAFETY: as above; if it was never registered, nothing happens.
        unsafe { sys::virConnectUnregisterCloseCallback(raw, Some(closed)) };
        // Nothing can be done about an error.
        let _ = self.connect.close();
    }
}
