// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A read-only connection to libvirt: which domains run, their XML, and events about them.
//!
//! An event only names the domain that changed. The bridge reads the domain's state afterwards,
//! because the state may have changed again. Out of scope: the meaning of a domain's XML.

use std::ffi::{c_int, c_void};
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, Sender, channel};
use virt::connect::Connect;
use virt::domain::Domain;
use virt::error::{Error, ErrorNumber};
use virt_sys as sys;

/// Event that a callback of libvirt reports to the bridge's main thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The state or the metadata of the domain with this UUID has changed.
    Domain(String),
    /// The connection to libvirt with this number has ended.
    Closed(usize),
}

/// State of a domain as libvirt reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The domain is running.
    Runs,
    /// libvirt knows the domain, but the domain is not running.
    Stopped,
    /// libvirt does not know the domain. The domain was transient and stopped, has been undefined,
    /// or never belonged to libvirt.
    Unknown,
}

/// Seconds between two keepalive messages to a silent libvirt, and the number of unanswered
/// messages after which the library closes the connection. The bridge thus notices a libvirt that
/// hangs.
const KEEPALIVE: (c_int, u32) = (5, 3);

/// Channel to which libvirt's callbacks send events. It is static, because libvirt may call back
/// after the end of a connection.
static EVENTS: OnceLock<Sender<Event>> = OnceLock::new();

fn send(event: Event) {
    if let Some(events) = EVENTS.get() {
        // Sending fails only when the process ends, because no thread receives events then.
        let _ = events.send(event);
    }
}

fn last_error() -> String {
    Error::last_error().message().into()
}

/// Starts libvirt's event loop in a thread of its own. The caller must do so before it opens a
/// connection.
///
/// # Errors
/// Returns an error if libvirt's library refuses the event loop, or if no thread can be created.
pub fn start_events() -> Result<Receiver<Event>, String> {
    let (sender, receiver) = channel();
    if EVENTS.set(sender).is_err() {
        return Err("a bug: the event loop runs already".into());
    }
    // Without this call, libvirt would also print each error to stderr.
    virt::error::clear_error_callback();
    // SAFETY: virEventRegisterDefaultImpl must be called before a connection is opened, and none
    // has been.
    if unsafe { sys::virEventRegisterDefaultImpl() } < 0 {
        return Err(format!(
            "cannot register libvirt's event loop: {}",
            last_error()
        ));
    }
    let run = || {
        loop {
            // SAFETY: the event loop is registered, and only this thread runs it.
            if unsafe { sys::virEventRunDefaultImpl() } < 0 {
                tracing::error!("libvirt's event loop failed: {}", last_error());
                std::thread::sleep(std::time::Duration::from_secs(1));
            }
        }
    };
    let thread = std::thread::Builder::new().name("events".into()).spawn(run);
    thread.map_err(|error| format!("no thread for libvirt's events: {error}"))?;
    Ok(receiver)
}

/// Sends an event for `domain` to the bridge's main thread.
///
/// # Safety
/// `domain` must be a valid domain of libvirt, which it is in a callback.
unsafe fn send_domain_event(domain: sys::virDomainPtr) {
    let mut uuid = [0; sys::VIR_UUID_STRING_BUFLEN as usize];
    // SAFETY: the domain is valid during the callback, and the buffer has the length that the
    // function requires.
    if unsafe { sys::virDomainGetUUIDString(domain, uuid.as_mut_ptr()) } < 0 {
        return;
    }
    let bytes: Vec<u8> = uuid
        .iter()
        .map(|byte| *byte as u8)
        .take_while(|byte| *byte != 0)
        .collect();
    send(Event::Domain(String::from_utf8_lossy(&bytes).into_owned()));
}

/// Callback for a changed state of a domain: libvirt's virConnectDomainEventCallback.
unsafe extern "C" fn lifecycle(
    _connection: sys::virConnectPtr,
    domain: sys::virDomainPtr,
    _event: c_int,
    _detail: c_int,
    _opaque: *mut c_void,
) -> c_int {
    // SAFETY: libvirt passes a valid domain.
    unsafe { send_domain_event(domain) };
    0
}

/// Callback for changed metadata of a domain: libvirt's
/// virConnectDomainEventMetadataChangeCallback.
unsafe extern "C" fn metadata(
    _connection: sys::virConnectPtr,
    domain: sys::virDomainPtr,
    _kind: c_int,
    _namespace: *const std::ffi::c_char,
    _opaque: *mut c_void,
) {
    // SAFETY: libvirt passes a valid domain.
    unsafe { send_domain_event(domain) };
}

/// Callback for a closed connection: libvirt's virConnectCloseFunc. `opaque` is the connection's
/// number, and is never dereferenced.
unsafe extern "C" fn closed(_connection: sys::virConnectPtr, _reason: c_int, opaque: *mut c_void) {
    send(Event::Closed(opaque as usize));
}

/// A connection to libvirt with subscriptions to events.
pub struct Connection {
    connect: Connect,
    callbacks: Vec<c_int>,
}

impl Connection {
    /// Connects to libvirt at `uri`, and subscribes to events. The event [`Event::Closed`] of this
    /// connection has the number `number`.
    ///
    /// # Errors
    /// Returns an error if libvirt cannot be reached, or does not support events.
    pub fn open(uri: &str, number: usize) -> Result<Connection, String> {
        let connect = Connect::open_read_only(Some(uri)).map_err(|e| e.message().to_string())?;
        let mut connection = Connection {
            connect,
            callbacks: Vec::new(),
        };
        let raw = connection.connect.as_ptr();
        let opaque = number as *mut c_void;
        let register = sys::virConnectRegisterCloseCallback;
        // SAFETY: the connection is open, the callback has the type that libvirt requires, and its
        // opaque value is a number that needs no freeing.
        let watched = unsafe { register(raw, Some(closed), opaque, None) };
        if watched < 0 {
            return Err(last_error());
        }
        // Some transports do not support keepalive messages. The bridge then notices a connection
        // that is closed, but not one that hangs.
        // SAFETY: the connection is open.
        if unsafe { sys::virConnectSetKeepAlive(raw, KEEPALIVE.0, KEEPALIVE.1) } < 0 {
            tracing::warn!(
                "cannot enable keepalive messages to libvirt: {}. A connection that hangs is not \
                 noticed; if changes of domains have no effect, restart tmem-libvirt",
                last_error()
            );
        }
        type Generic = unsafe extern "C" fn(sys::virConnectPtr, sys::virDomainPtr, *mut c_void);
        // SAFETY: libvirt.h defines that callbacks are registered as VIR_DOMAIN_EVENT_CALLBACK and
        // called as the type of their event. Both functions have the types of their events.
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
            // SAFETY: the connection is open, a null domain selects all domains, and the null
            // opaque value needs no freeing.
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

    /// Returns the UUIDs of all running domains.
    ///
    /// # Errors
    /// Returns an error if libvirt cannot be reached.
    pub fn running_uuids(&self) -> Result<Vec<String>, String> {
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
            Err(error) => none_if_unknown(&error),
        }
    }

    /// Returns the XML of a domain, or None if the domain does not run or does not exist.
    ///
    /// # Errors
    /// Returns an error if libvirt cannot be reached.
    pub fn running_xml(&self, uuid: &str) -> Result<Option<String>, String> {
        let Some(domain) = self.find(uuid)? else {
            return Ok(None);
        };
        let xml = domain.is_active().and_then(|active| match active {
            true => domain.get_xml_desc(0).map(Some),
            false => Ok(None),
        });
        xml.or_else(|error| none_if_unknown(&error))
    }

    /// Returns the state of the domain with the UUID `uuid`.
    ///
    /// # Errors
    /// Returns an error if libvirt cannot be reached.
    pub fn state(&self, uuid: &str) -> Result<State, String> {
        let Some(domain) = self.find(uuid)? else {
            return Ok(State::Unknown);
        };
        match domain.is_active() {
            Ok(true) => Ok(State::Runs),
            Ok(false) => Ok(State::Stopped),
            Err(error) => none_if_unknown(&error).map(|_: Option<()>| State::Unknown),
        }
    }
}

/// Returns None if `error` means that the domain does not exist. Returns any other failure as an
/// error.
fn none_if_unknown<T>(error: &Error) -> Result<Option<T>, String> {
    match error.code() {
        ErrorNumber::NoDomain => Ok(None),
        _ => Err(error.message().into()),
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let raw = self.connect.as_ptr();
        for id in &self.callbacks {
            // SAFETY: the connection is still open, and the callback was registered with it. The
            // call is also allowed if the server has ended.
            unsafe { sys::virConnectDomainEventDeregisterAny(raw, *id) };
        }
        // SAFETY: the connection is still open. Without a registered callback the call only fails.
        unsafe { sys::virConnectUnregisterCloseCallback(raw, Some(closed)) };
        // An error of closing is ignored, because there is no remedy for it.
        let _ = self.connect.close();
    }
}
