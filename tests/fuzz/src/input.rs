// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Converts the fuzzer's bytes to choices, such as what the guest does next.
//!
//! [`Input`] reads bytes from the front, so that people can write seeds by hand. A change of the
//! last bytes does not affect the choices before. After the last byte, `Input` returns zeros. The
//! crate `arbitrary` is unsuitable, because it reads lengths from the end of the input.

/// The fuzzer's bytes that no choice has used yet.
pub struct Input<'a>(&'a [u8]);

/// Numbers at boundaries: of signed and unsigned integers, of page indices, of page sizes.
const BORDERS: [u64; 16] = [
    0,
    1,
    1 << 7,
    1 << 12,
    1 << 15,
    1 << 16,
    1 << 31,
    1 << 32,
    (1 << 32) - 4096,
    1 << 44,
    1 << 47,
    1 << 51,
    1 << 52,
    1 << 63,
    u64::MAX - 4096,
    u64::MAX,
];

impl<'a> Input<'a> {
    /// Creates an input from the fuzzer's bytes.
    pub fn new(bytes: &'a [u8]) -> Self {
        Input(bytes)
    }

    /// Returns whether all bytes are used. From then on, the input returns zeros.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the next `count` bytes, or fewer at the end.
    pub fn bytes(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        taken
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut out = [0; N];
        let taken = self.bytes(N);
        out[..taken.len()].copy_from_slice(taken);
        out
    }

    /// Returns the next byte.
    pub fn u8(&mut self) -> u8 {
        self.array::<1>()[0]
    }

    /// Returns the next two bytes as a number.
    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    /// Returns the next four bytes as a number.
    pub fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    /// Returns a number below `count`, from the next byte. `count` must be at most 256.
    pub fn below(&mut self, count: usize) -> usize {
        usize::from(self.u8()) % count
    }

    /// Returns a number: a small one, one near a boundary, or an arbitrary one.
    pub fn number(&mut self) -> u64 {
        match self.u8() {
            small @ 0..=199 => u64::from(small) % 40,
            near @ 200..=247 => {
                let at = BORDERS[usize::from(near - 200) % BORDERS.len()];
                at.wrapping_add(u64::from(self.u8())).wrapping_sub(128)
            }
            _ => u64::from_le_bytes(self.array()),
        }
    }
}
