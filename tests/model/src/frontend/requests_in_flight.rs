// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Requests in flight of the fake guest. The guest writes them into slots of guest memory, adds
//! their descriptor chains to rings, waits for answers and takes them.

use super::*;

impl FakeGuest {
    /// Writes a request into a free slot (guest memory for one request). Adds no descriptor chain
    /// yet. Returns None if no slot is free.
    #[must_use]
    pub fn place(&mut self, encoded: &Encoded) -> Option<(usize, Placed)> {
        let slot = self.slots_free.pop()?;
        let base = self.slots[slot];
        let (first, tail) = (base + PAGE_BYTES, base + 65 * PAGE_BYTES);
        // Only one part of the request, readable or writable, has page data. In that part, the
        // metadata ends where the pages begin.
        let readable_big = !encoded.data.is_empty() || encoded.answer_data_bytes == 0;
        let place = |meta: usize, data: usize, big: bool| {
            if big {
                assert!(meta <= PAGE && data <= 64 * PAGE);
                vec![(first - meta as u64, meta), (first, data)]
            } else {
                vec![(tail, meta + data)]
            }
        };
        let readable = place(encoded.meta.len(), encoded.data.len(), readable_big);
        let writable = place(
            encoded.answer_meta_bytes,
            encoded.answer_data_bytes,
            !readable_big,
        );
        self.ram.write(readable[0].0, &encoded.meta);
        if let Some(data) = readable.get(1) {
            self.ram.write(data.0, &encoded.data);
        }
        let unanswered = vec![wire::S_UNANSWERED; encoded.answer_meta_bytes.min(PAGE)];
        self.ram.write(writable[0].0, &unanswered);
        Some((
            slot,
            Placed {
                readable,
                writable,
                table: base + 66 * PAGE_BYTES,
            },
        ))
    }

    /// Adds a request to a queue without publishing it to the device. Returns the request's token,
    /// or None if the ring is full or no slot is free.
    pub fn add(&mut self, queue: usize, request: Request, generation: u64) -> Option<u64> {
        let encoded = request.encode(generation);
        self.add_encoded(queue, request, generation, &encoded)
    }

    /// Adds a request as [`Self::add`] does, but with the bytes `encoded`, which the caller has
    /// modified. Returns None if the ring is full or no slot is free.
    pub fn add_encoded(
        &mut self,
        queue: usize,
        request: Request,
        generation: u64,
        encoded: &Encoded,
    ) -> Option<u64> {
        let (slot, placed) = self.place(encoded)?;
        let stretches: Vec<(u64, usize, bool)> = placed
            .readable
            .iter()
            .map(|&(a, n)| (a, n, false))
            .chain(placed.writable.iter().map(|&(a, n)| (a, n, true)))
            .collect();
        let token = self.token_next;
        let how = match self.config.cut {
            // Use another seed for each request, so that chains are divided at different places.
            Cut::Random { seed, max } => Cut::Random {
                seed: seed ^ (token << 20),
                max,
            },
            other => other,
        };
        let buffers = cut(&stretches, how);
        let indirect = self.features & F_INDIRECT_DESC != 0 && buffers.len() <= INDIRECT_MAX;
        let table = indirect.then_some(placed.table);
        if let Err(RingFull) = self.queues[queue].ring.add(&buffers, table, token) {
            self.slots_free.push(slot);
            return None;
        }
        self.token_next += 1;
        let pending = Pending {
            queue,
            request,
            generation,
            slot,
            placed,
        };
        self.pending.insert(token, pending);
        Some(token)
    }

    /// Adds a chain whose descriptors the caller wrote, for a request that [`Self::place`] wrote to
    /// the addresses `placed`. Writes `head` to the avail ring unchanged. The answer is later read
    /// from the writable part of `placed`.
    pub fn add_by_hand(
        &mut self,
        queue: usize,
        request: Request,
        (slot, placed): (usize, Placed),
        head: u16,
        descs: Vec<u16>,
    ) -> u64 {
        let token = self.token_next;
        self.token_next += 1;
        self.queues[queue].ring.add_raw(head, descs, token);
        let pending = Pending {
            queue,
            request,
            generation: 0,
            slot,
            placed,
        };
        self.pending.insert(token, pending);
        token
    }

    /// Publishes the added requests to the device. Kicks the device unless it has disabled kicks.
    ///
    /// # Panics
    /// When the kick fails, which cannot happen with an eventfd of this process.
    pub fn publish(&mut self, queue: usize) {
        let q = &mut self.queues[queue];
        if q.ring.publish() {
            q.kick.write(1).expect("cannot write to an eventfd");
        }
    }

    /// Kicks the device even if it has disabled kicks.
    ///
    /// # Panics
    /// When the kick fails, which cannot happen with an eventfd of this process.
    pub fn kick(&self, queue: usize) {
        self.queues[queue]
            .kick
            .write(1)
            .expect("cannot write to an eventfd");
    }

    /// Adds a request to a queue, publishes it, and kicks the device if it wants that. Returns the
    /// request's token, or None if the ring is full or no slot is free.
    pub fn submit(&mut self, queue: usize, request: Request) -> Option<u64> {
        let generation = self.generation();
        let token = self.add(queue, request, generation)?;
        self.publish(queue);
        Some(token)
    }

    /// Takes the next answer of a queue. Returns None if no answer has arrived.
    ///
    /// # Errors
    /// When the device broke the rules of the ring.
    pub fn poll(&mut self, queue: usize) -> Result<Option<Done>, GuestError> {
        let used = self.queues[queue]
            .ring
            .pop_used()
            .map_err(|error| GuestError::Ring {
                guest: self.config.name.clone(),
                queue,
                error,
            })?;
        let Some(used) = used else { return Ok(None) };
        let p = self
            .pending
            .remove(&used.token)
            .expect("a chain in flight has no request");
        self.slots_free.push(p.slot);
        let meta_bytes = p.request.answer_sizes().0;
        let (meta_at, meta_room) = p.placed.writable[0];
        let mut meta = vec![wire::S_UNANSWERED; meta_bytes];
        let n = meta_bytes.min(meta_room);
        self.ram.read(meta_at, &mut meta[..n]);
        let data_at = p
            .placed
            .writable
            .get(1)
            .map_or(meta_at + meta_bytes as u64, |d| d.0);
        let answer = decode(&p.request, used.len, &meta, |i| {
            let mut page = Box::new([0; PAGE]);
            self.ram.read(data_at + i as u64 * PAGE_BYTES, &mut *page);
            page
        });
        Ok(Some(Done {
            token: used.token,
            queue: p.queue,
            request: p.request,
            generation: p.generation,
            answer,
        }))
    }

    /// Takes all answers that have arrived on all queues.
    ///
    /// # Errors
    /// Errors of [`Self::poll`].
    pub fn poll_all(&mut self) -> Result<Vec<Done>, GuestError> {
        let mut out = Vec::new();
        for queue in 0..self.queues.len() {
            while let Some(done) = self.poll(queue)? {
                out.push(done);
            }
        }
        Ok(out)
    }

    /// Waits for at least one answer. Returns at once if no request is in flight. The call sleeps
    /// until an interrupt (call descriptor) arrives, so that a missing interrupt results in an
    /// error.
    ///
    /// # Errors
    /// [`GuestError::Late`] at the deadline, and errors of [`Self::poll`].
    pub fn wait(&mut self, timeout: Duration) -> Result<Vec<Done>, GuestError> {
        let deadline = Instant::now() + timeout;
        loop {
            let done = self.poll_all()?;
            if !done.is_empty() || self.pending.is_empty() {
                return Ok(done);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let in_flight = self.pending.len();
                return Err(GuestError::Late {
                    guest: self.config.name.clone(),
                    in_flight,
                });
            }
            self.sleep_on_calls(left);
        }
    }

    fn sleep_on_calls(&self, timeout: Duration) {
        use std::os::fd::AsRawFd;
        let fds: Vec<BorrowedFd<'_>> = self
            .queues
            .iter()
            // SAFETY: the eventfds live as long as `self`, which is borrowed beyond the call.
            .map(|q| unsafe { BorrowedFd::borrow_raw(q.call.as_raw_fd()) })
            .collect();
        let mut set: Vec<PollFd<'_>> = fds
            .iter()
            .map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN))
            .collect();
        let timeout =
            Timespec::try_from(timeout).expect("the timeout does not fit into a timespec");
        // Ignore the result of the sleep, even if a signal ended it, because the loop polls again.
        let _ = poll(&mut set, Some(&timeout));
        for q in &self.queues {
            // Ignore an error, which means that this queue had no interrupt.
            let _ = q.call.read();
        }
    }

    /// Waits until no request is in flight. Returns the answered requests.
    ///
    /// # Errors
    /// Errors of [`Self::wait`].
    pub fn drain(&mut self, timeout: Duration) -> Result<Vec<Done>, GuestError> {
        let deadline = Instant::now() + timeout;
        let mut out = Vec::new();
        while !self.pending.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            out.extend(self.wait(left)?);
        }
        Ok(out)
    }

    /// Sends one request alone and waits for its answer.
    ///
    /// # Errors
    /// Errors of [`Self::wait`].
    ///
    /// # Panics
    /// When the ring is full or other requests are in flight.
    pub fn call(&mut self, queue: usize, request: Request) -> Result<Answer, GuestError> {
        assert!(
            self.pending.is_empty(),
            "call() was used while {} other requests are in flight",
            self.pending.len()
        );
        self.submit(queue, request)
            .expect("an empty ring has no room");
        let mut done = self.drain(self.config.reply_timeout)?;
        Ok(done.remove(0).answer)
    }

    /// Returns whether the device has signalled an error on a queue since the last call of this
    /// function.
    #[must_use]
    pub fn take_queue_error(&self, queue: usize) -> bool {
        self.queues[queue].err.read().is_ok()
    }

    /// Returns the address and length of the metadata of a request in flight, or None if no request
    /// with this token is in flight. Tests use it to overwrite the request.
    #[must_use]
    pub fn readable_of(&self, token: u64) -> Option<(u64, usize)> {
        self.pending.get(&token).map(|p| p.placed.readable[0])
    }
}
