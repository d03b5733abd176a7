// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the index keeps for one page: its cookie, where its contents are, and what was charged.

use crate::blob::{Blob, DomainId, Store};
use crate::codec::{self, Corrupt};
use crate::config::{PAGE_METADATA_CHARGE_BYTES, Page};
use crate::evict::Token;
use crate::hash;
use std::sync::Arc;

/// Contents of a page.
#[derive(Debug)]
pub(crate) enum Content {
    /// The page repeats these bytes; there is no blob.
    Same([u8; 8]),
    /// Compressed or raw, perhaps shared with other entries of the trust domain.
    Blob(Arc<Blob>),
}

/// A page made ready outside all locks.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub content: Content,
    /// Bits of the page's hash, to check what a get returns.
    pub check: u32,
    /// An equal page was found.
    pub shared: bool,
}

impl Prepared {
    pub(crate) fn new(
        store: &Arc<Store>,
        domain: DomainId,
        hash: hash::HashFn,
        seed: u64,
        page: &Page,
    ) -> Prepared {
        let hash = hash(page, seed);
        let check = hash::check_bits(hash);
        if let Some(pattern) = codec::same_filled(page) {
            return Prepared {
                content: Content::Same(pattern),
                check,
                shared: false,
            };
        }
        let (blob, shared) = store.intern(domain, hash, page);
        Prepared {
            content: Content::Blob(blob),
            check,
            shared,
        }
    }

    /// What a tenant pays for it, whoever else holds the same page.
    pub(crate) fn charge_bytes(&self) -> u64 {
        PAGE_METADATA_CHARGE_BYTES + self.content.stored_bytes()
    }
}

impl Content {
    fn stored_bytes(&self) -> u64 {
        match self {
            Content::Same(_) => 0,
            Content::Blob(blob) => blob.stored_bytes(),
        }
    }
}

/// A page in the index.
#[derive(Debug)]
pub(crate) struct Entry {
    pub cookie: u64,
    pub token: Token,
    content: Content,
    check: u32,
    shared: bool,
}

impl Entry {
    pub(crate) fn new(prepared: Prepared, cookie: u64, token: Token) -> Entry {
        let Prepared {
            content,
            check,
            shared,
        } = prepared;
        Entry {
            cookie,
            token,
            content,
            check,
            shared,
        }
    }

    /// What it adds to its tenant's gauges.
    pub(crate) fn gauges(&self) -> Gauges {
        Gauges {
            pages: 1,
            compressed_bytes: self.content.stored_bytes(),
            same_filled_pages: matches!(self.content, Content::Same(_)).into(),
            shared_pages: self.shared.into(),
        }
    }

    /// Restores the page and checks it. `out` is unspecified after an error.
    pub(crate) fn read(
        &self,
        hash: hash::HashFn,
        seed: u64,
        out: &mut Page,
    ) -> Result<(), Corrupt> {
        match &self.content {
            Content::Same(pattern) => codec::fill(*pattern, out),
            Content::Blob(blob) => blob.read(out)?,
        }
        if hash::check_bits(hash(out, seed)) == self.check {
            Ok(())
        } else {
            Err(Corrupt)
        }
    }
}

impl Entry {
    #[cfg(test)]
    pub(crate) fn content_mut(&mut self) -> &mut Content {
        &mut self.content
    }

    pub(crate) fn content(&self) -> &Content {
        &self.content
    }
}

/// Sums over entries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Gauges {
    pub pages: u32,
    pub same_filled_pages: u32,
    pub shared_pages: u32,
    pub compressed_bytes: u64,
}

impl Gauges {
    pub(crate) fn add(&mut self, other: Gauges) {
        self.pages += other.pages;
        self.same_filled_pages += other.same_filled_pages;
        self.shared_pages += other.shared_pages;
        self.compressed_bytes += other.compressed_bytes;
    }

    pub(crate) fn sub(&mut self, other: Gauges) {
        self.pages -= other.pages;
        self.same_filled_pages -= other.same_filled_pages;
        self.shared_pages -= other.shared_pages;
        self.compressed_bytes -= other.compressed_bytes;
    }

    pub(crate) fn charged_bytes(&self) -> u64 {
        self.compressed_bytes + u64::from(self.pages) * PAGE_METADATA_CHARGE_BYTES
    }
}
