// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Page contents that are generated from a few bytes, so that a model of a large cache takes little
//! memory.
//!
//! There is a kind of content for each form in which the engine stores pages: one repeated word,
//! text that compresses, and noise that does not. Equal values give equal pages, in one guest or in
//! several guests. If values come from a small set, the engine shares the pages. If a value
//! contains a cookie, its page is unique.

use crate::requests::{PAGE, Page};

/// Content of a page: the kind, and the value from which the bytes are generated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Content {
    /// One 64-bit word that fills the page.
    SameFilled(u64),
    /// Words of a small dictionary in random order: the page compresses to about a third.
    Text(u64),
    /// Random bytes, which do not compress.
    Noise(u64),
}

impl Content {
    /// Returns the bytes of a page with this content.
    #[must_use]
    pub fn page(self) -> Box<Page> {
        let mut page = Box::new([0; PAGE]);
        match self {
            Self::SameFilled(word) => {
                for chunk in page.chunks_exact_mut(8) {
                    chunk.copy_from_slice(&word.to_le_bytes());
                }
            }
            Self::Text(seed) => {
                const WORDS: [&[u8; 8]; 8] = [
                    b"balloon ",
                    b"folio in",
                    b"evicted ",
                    b"pool of ",
                    b"a queue ",
                    b"cookie, ",
                    b"object. ",
                    b"\n\tindex ",
                ];
                let mut rng = fastrand::Rng::with_seed(seed ^ 0x7465_7874);
                for chunk in page.chunks_exact_mut(8) {
                    chunk.copy_from_slice(WORDS[rng.usize(..WORDS.len())]);
                }
                // Write the seed into the page, so that two different texts are never equal by
                // chance.
                page[..8].copy_from_slice(&seed.to_le_bytes());
            }
            Self::Noise(seed) => {
                fastrand::Rng::with_seed(seed ^ 0x006e_6f69).fill(&mut *page);
                page[..8].copy_from_slice(&seed.to_le_bytes());
            }
        }
        page
    }
}
