// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Records guests' requests to the pool in a trace file for `tmem-bench policies`. docs/traces.md
//! describes the format.
//!
//! Recording is off by default, and the size of a trace is bounded. A worker appends to a buffer in
//! memory, and a separate thread writes full buffers to the file, so no guest waits for the host's
//! disk. But a guest's requests take longer, because the recorder also compresses each put page, to
//! record the size of the result.

use crate::host::sandbox::{self, ThreadKind};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;
use tmem_pool::{Put, PutResult, Ref};
use tmem_trace::format::{Blind, Event, Op, SizeClass, Writer};

/// Number of bytes that are collected in memory before they are written to the trace file: about
/// 10,000 events.
const BUFFER_BYTES: usize = 64 << 10;

/// Largest number of full buffers that wait for the disk, 16 MiB. If the disk is slower than the
/// guests for longer, the recording ends.
const BUFFERS_MAX: usize = 256;

struct TraceState {
    writer: Writer,
    buffer: Vec<u8>,
    /// Number of bytes that may still be added before the trace reaches its maximum size.
    left_bytes: u64,
    /// Channel that passes full buffers to the writing thread; None after the trace has ended.
    full: Option<SyncSender<Vec<u8>>>,
    thread: Option<JoinHandle<()>>,
}

/// Recorder that writes the requests of all VMs to one trace.
pub struct Recorder {
    path: PathBuf,
    begun: Instant,
    blind: Blind,
    /// Guards the events that are not written yet. The lock also determines the order of events in
    /// the trace. A thread that holds it holds no lock of the pool.
    state: Mutex<TraceState>,
}

fn write_all(mut file: File, path: &Path, buffers: &Receiver<Vec<u8>>) {
    for buffer in buffers {
        if let Err(error) = file.write_all(&buffer) {
            tracing::error!("trace {}: {error}; the recording ends", path.display());
            return;
        }
    }
}

impl Recorder {
    /// Creates a trace in a new file. Only the file's owner can read it, because it describes the
    /// guests' activity.
    ///
    /// # Errors
    /// The file exists or cannot be created, or the system cannot start the thread that writes it.
    pub fn create(path: &Path, bytes_max: u64) -> io::Result<Recorder> {
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)
            .map_err(|e| io::Error::new(e.kind(), format!("trace {}: {e}", path.display())))?;
        let (full, buffers) = sync_channel(BUFFERS_MAX);
        let own_path = path.to_owned();
        let thread = std::thread::Builder::new()
            .name("trace".into())
            .spawn(move || {
                sandbox::narrow(ThreadKind::Data);
                write_all(file, &own_path, &buffers);
            })?;
        tracing::info!(bytes_max, "recording a trace to {}", path.display());
        Ok(Recorder {
            path: path.to_owned(),
            begun: Instant::now(),
            blind: Blind::default(),
            state: Mutex::new(TraceState {
                writer: Writer::default(),
                buffer: Vec::with_capacity(BUFFER_BYTES),
                left_bytes: bytes_max,
                full: Some(full),
                thread: Some(thread),
            }),
        })
    }

    /// Ends the trace. When the function returns, the trace file is complete.
    pub fn finish(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let buffer = std::mem::take(&mut state.buffer);
        if let Some(full) = state.full.take() {
            // If sending fails, the writing thread has logged a failure and ended.
            let _ = full.send(buffer);
        }
        let thread = state.thread.take();
        drop(state);
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("a bug: the thread that writes the trace panicked");
        }
    }

    fn record(&self, tenant: u32, ops: impl Iterator<Item = Op>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let TraceState {
            writer,
            buffer,
            left_bytes,
            full,
            ..
        } = &mut *state;
        let Some(sender) = full else { return };
        // The time is read under the lock, so that the times in the trace never decrease.
        let time_us = self.begun.elapsed().as_micros() as u64;
        let mut is_full = false;
        for op in ops {
            is_full = *left_bytes < (buffer.len() + Writer::EVENT_BYTES_MAX) as u64;
            if is_full {
                break;
            }
            let event = Event {
                time_us,
                tenant,
                op,
            };
            writer.write(&event, buffer);
        }
        if is_full || buffer.len() >= BUFFER_BYTES {
            *left_bytes -= buffer.len() as u64;
            let buffer = std::mem::replace(buffer, Vec::with_capacity(BUFFER_BYTES));
            let sent = sender.try_send(buffer);
            if let Err(TrySendError::Full(_)) = sent {
                tracing::error!(
                    "trace {}: the disk is too slow, and the recording ends; use a faster disk",
                    self.path.display()
                );
            }
            // The writing thread may also have logged a failure and ended.
            if sent.is_err() || is_full {
                *full = None;
            }
        }
        if is_full {
            tracing::info!(
                "trace {}: the file reached its maximum size, and the recording ends",
                self.path.display()
            );
        }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.finish();
    }
}

/// Records the requests of one VM in the trace.
#[derive(Clone)]
pub struct Tap {
    recorder: Arc<Recorder>,
    tenant: u32,
}

impl Tap {
    /// Creates the recorder of one VM. `tenant` is the VM's number in the trace.
    pub fn new(recorder: Arc<Recorder>, tenant: u32) -> Tap {
        Tap { recorder, tenant }
    }

    /// Records a PUT of pages. A refused page is recorded as a flush, because it leaves nothing
    /// under its key. `stored_bytes` has an element for each page: its compressed size in bytes.
    /// The element of a refused page has no meaning.
    pub fn put(
        &self,
        pool: u32,
        puts: &[Put<'_>],
        results: &[PutResult],
        stored_bytes: impl Iterator<Item = usize>,
    ) {
        let blind = &self.recorder.blind;
        let ops: Vec<Op> = puts
            .iter()
            .zip(results)
            .zip(stored_bytes)
            .filter_map(|((put, result), stored_bytes)| {
                let (object, distance) = blind.object(self.tenant, pool, put.object);
                let page = distance.page(put.index)?;
                Some(match result {
                    PutResult::Stored => Op::Put {
                        object,
                        page,
                        workingset: put.workingset,
                        size: SizeClass::from_bytes(stored_bytes),
                    },
                    PutResult::Refused => Op::Flush {
                        object,
                        page,
                        nr_pages: Some(1),
                    },
                })
            })
            .collect();
        self.recorder.record(self.tenant, ops.into_iter());
    }

    /// Records a GET of pages of an object from `index` on, and for each page whether the pool had
    /// it. If bit n of `retain` is set, the pool may retain page n.
    pub fn get(
        &self,
        pool: u32,
        object: u64,
        index: u64,
        hits: impl Iterator<Item = bool>,
        retain: u64,
    ) {
        let (object, distance) = self.recorder.blind.object(self.tenant, pool, object);
        let ops = hits.enumerate().filter_map(|(nth, hit)| {
            let page = distance.page(index + nth as u64)?;
            Some(match retain >> nth & 1 {
                0 => Op::Get { object, page, hit },
                _ => Op::GetRetaining { object, page, hit },
            })
        });
        self.recorder.record(self.tenant, ops);
    }

    /// Records a REF of retained pages, and for each page whether the pool still had it (HELD).
    pub fn refer(&self, pool: u32, refs: &[Ref], held: &[bool]) {
        let blind = &self.recorder.blind;
        let ops: Vec<Op> = refs
            .iter()
            .zip(held)
            .filter_map(|(page, &held)| {
                let (object, distance) = blind.object(self.tenant, pool, page.object);
                let page = distance.page(page.index)?;
                Some(Op::Ref { object, page, held })
            })
            .collect();
        self.recorder.record(self.tenant, ops.into_iter());
    }

    /// Records a flush of pages. If `nr_pages` is None, the flush reaches to the end of the object.
    pub fn flush(&self, pool: u32, object: u64, index: u64, nr_pages: Option<u64>) {
        let (object, distance) = self.recorder.blind.object(self.tenant, pool, object);
        let op = match (index, nr_pages) {
            (0, None) => Some(Op::FlushObject(object)),
            _ => distance.page(index).map(|page| Op::Flush {
                object,
                page,
                nr_pages,
            }),
        };
        self.recorder.record(self.tenant, op.into_iter());
    }

    /// Records that a guest destroyed one of its pools.
    pub fn destroy_pool(&self, pool: u32) {
        let pool = self.recorder.blind.pool(self.tenant, pool);
        self.recorder
            .record(self.tenant, std::iter::once(Op::DestroyPool(pool)));
    }

    /// Records that the daemon emptied all pools of a VM.
    pub fn clear(&self) {
        self.recorder
            .record(self.tenant, std::iter::once(Op::Clear));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tmem_trace::format::Reader;

    #[test]
    fn the_trace_distinguishes_gets_that_may_retain_the_page() {
        let folder = tempfile::tempdir().expect("cannot create a temporary directory");
        let path = folder.path().join("trace");
        let recorder = Arc::new(Recorder::create(&path, 1 << 20).expect("cannot create the trace"));
        let tap = Tap::new(Arc::clone(&recorder), 1);
        tap.get(1, 5, 7, [true, true, false].into_iter(), 0b101);
        let refs = [7, 9].map(|index| Ref {
            object: 5,
            index,
            cookie: 1,
        });
        tap.refer(1, &refs, &[true, false]);
        recorder.finish();
        let bytes = std::fs::read(&path).expect("cannot read the trace");
        let reader = Reader::new(&bytes).expect("the recorded file is not a trace");
        let ops: Vec<Op> = reader
            .map(|event| event.expect("the recorded trace is incomplete").op)
            .collect();
        let Some(&Op::GetRetaining {
            object,
            page,
            hit: true,
        }) = ops.first()
        else {
            panic!("the first event is not a get of a page that may be retained: {ops:?}");
        };
        let (second, third) = (page + 1, page + 2);
        let expected = [
            Op::Get {
                object,
                page: second,
                hit: true,
            },
            Op::GetRetaining {
                object,
                page: third,
                hit: false,
            },
            Op::Ref {
                object,
                page,
                held: true,
            },
            Op::Ref {
                object,
                page: third,
                held: false,
            },
        ];
        assert_eq!(ops[1..], expected);
    }

    #[test]
    fn a_slow_disk_ends_the_recording() {
        let (full, buffers) = sync_channel(1);
        let recorder = Arc::new(Recorder {
            path: PathBuf::from("slow"),
            begun: Instant::now(),
            blind: Blind::default(),
            state: Mutex::new(TraceState {
                writer: Writer::default(),
                buffer: Vec::new(),
                left_bytes: u64::MAX,
                full: Some(full),
                thread: None,
            }),
        });
        let tap = Tap::new(Arc::clone(&recorder), 1);
        // No thread receives the buffers, so the channel has no room for the second one.
        for _ in 0..BUFFER_BYTES {
            tap.get(1, 5, 7, [true; 64].into_iter(), 0);
        }
        assert!(recorder.state.lock().unwrap().full.is_none());
        assert_eq!(buffers.iter().count(), 1);
    }
}
