// SPDX-License-Identifier: Apache-2.0 OR MIT
//! 128-bit xxh3 of a page with AVX2, as xxHash's specification defines it for inputs of more than
//! 240 bytes. Names are those of the specification.

use super::SECRET_BYTES;
use crate::config::{PAGE_SIZE, Page};
use std::arch::x86_64::{
    __m256i, _mm256_add_epi64, _mm256_loadu_si256, _mm256_mul_epu32, _mm256_set1_epi32,
    _mm256_shuffle_epi32, _mm256_slli_epi64, _mm256_srli_epi64, _mm256_storeu_si256,
    _mm256_xor_si256,
};

const STRIPE: usize = 64;
const STRIPES: usize = (SECRET_BYTES - STRIPE) / 8;
const BLOCK: usize = STRIPE * STRIPES;
const BLOCKS: usize = PAGE_SIZE / BLOCK;
// The last block is a stripe short, because the last stripe of the page is processed separately.
const _: () = assert!(PAGE_SIZE.is_multiple_of(BLOCK));

const PRIME32: [u64; 3] = [0x9E37_79B1, 0x85EB_CA77, 0xC2B2_AE3D];
const PRIME64: [u64; 5] = [
    0x9E37_79B1_85EB_CA87,
    0xC2B2_AE3D_27D4_EB4F,
    0x1656_67B1_9E37_79F9,
    0x85EB_CA77_C2B2_AE63,
    0x27D4_EB2F_1656_67C5,
];
const PRIME_MX1: u64 = 0x1656_6791_9E37_79F9;

const ACC: [u64; 8] = [
    PRIME32[2], PRIME64[0], PRIME64[1], PRIME64[2], PRIME64[3], PRIME32[1], PRIME64[4], PRIME32[0],
];

/// Accumulators in two vectors of four lanes each.
type Acc = [__m256i; 2];

#[target_feature(enable = "avx2")]
fn load(bytes: &[u8], half: usize) -> __m256i {
    let bytes: &[u8; 32] = bytes[32 * half..][..32].try_into().expect("32 bytes");
    // SAFETY: `bytes` has the 32 bytes that the load reads, and the load needs no alignment.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

#[target_feature(enable = "avx2")]
fn accumulate(acc: &mut Acc, stripe: &[u8], secret: &[u8]) {
    for (half, acc) in acc.iter_mut().enumerate() {
        let data = load(stripe, half);
        let keyed = _mm256_xor_si256(data, load(secret, half));
        let product = _mm256_mul_epu32(keyed, _mm256_srli_epi64::<32>(keyed));
        // Each lane adds the data of its neighbour.
        let swapped = _mm256_shuffle_epi32::<0b01_00_11_10>(data);
        *acc = _mm256_add_epi64(product, _mm256_add_epi64(*acc, swapped));
    }
}

#[target_feature(enable = "avx2")]
fn scramble(acc: &mut Acc, secret: &[u8]) {
    let prime = _mm256_set1_epi32(PRIME32[0] as i32);
    for (half, acc) in acc.iter_mut().enumerate() {
        let mixed = _mm256_xor_si256(*acc, _mm256_srli_epi64::<47>(*acc));
        let mixed = _mm256_xor_si256(mixed, load(secret, half));
        let low = _mm256_mul_epu32(mixed, prime);
        let high = _mm256_mul_epu32(_mm256_srli_epi64::<32>(mixed), prime);
        *acc = _mm256_add_epi64(low, _mm256_slli_epi64::<32>(high));
    }
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

fn merge(acc: &[u64; 8], secret: &[u8], start: u64) -> u64 {
    let mut result = start;
    for pair in 0..4 {
        let a = acc[2 * pair] ^ word(secret, 16 * pair);
        let b = acc[2 * pair + 1] ^ word(secret, 16 * pair + 8);
        let product = u128::from(a) * u128::from(b);
        result = result.wrapping_add(product as u64 ^ (product >> 64) as u64);
    }
    result ^= result >> 37;
    result = result.wrapping_mul(PRIME_MX1);
    result ^ result >> 32
}

/// Returns xxh3's 128-bit hash of a page under this secret.
#[target_feature(enable = "avx2")]
pub(super) fn hash(page: &Page, secret: &[u8; SECRET_BYTES]) -> u128 {
    // SAFETY: `ACC` has the bytes of two vectors, and the loads need no alignment.
    let mut acc = unsafe {
        let at = ACC.as_ptr().cast::<__m256i>();
        [_mm256_loadu_si256(at), _mm256_loadu_si256(at.add(1))]
    };
    for block in 0..BLOCKS {
        let last = block == BLOCKS - 1;
        for nth in 0..STRIPES - usize::from(last) {
            let at = block * BLOCK + nth * STRIPE;
            accumulate(
                &mut acc,
                &page[at..at + STRIPE],
                &secret[8 * nth..][..STRIPE],
            );
        }
        if !last {
            scramble(&mut acc, &secret[SECRET_BYTES - STRIPE..]);
        }
    }
    accumulate(
        &mut acc,
        &page[PAGE_SIZE - STRIPE..],
        &secret[SECRET_BYTES - STRIPE - 7..][..STRIPE],
    );
    let mut lanes = [0; 8];
    // SAFETY: `lanes` has the bytes of two vectors, and the stores need no alignment.
    unsafe {
        let at = lanes.as_mut_ptr().cast::<__m256i>();
        _mm256_storeu_si256(at, acc[0]);
        _mm256_storeu_si256(at.add(1), acc[1]);
    }
    let len = PAGE_SIZE as u64;
    let low = merge(&lanes, &secret[11..], len.wrapping_mul(PRIME64[0]));
    let high = merge(
        &lanes,
        &secret[SECRET_BYTES - STRIPE - 11..],
        !len.wrapping_mul(PRIME64[1]),
    );
    u128::from(high) << 64 | u128::from(low)
}
