// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Entitlement: the bytes of the pool that a tenant can count on. It is a pure function of the
//! pool's size and all quotas.
//!
//! Each tenant gets its reserve first. The unreserved part is then divided by weight, and each
//! tenant gets at most its limit. The part that a tenant cannot take because of its limit is
//! divided among the other tenants, again by weight. If the pool is smaller than the sum of all
//! reserves, the reserves are scaled down. The sum of all entitlements never exceeds the pool's
//! size.

use crate::config::Quota;

impl Quota {
    /// Returns the part of the reserve, in bytes, that the quota's limit allows the tenant to use.
    pub(crate) fn usable_reserve_bytes(&self) -> u64 {
        self.reserve_bytes.min(self.limit_bytes.unwrap_or(u64::MAX))
    }
}

fn mul_div(value: u64, numerator: u64, denominator: u64) -> u64 {
    let result = u128::from(value) * u128::from(numerator) / u128::from(denominator);
    u64::try_from(result).expect("a share of the pool is larger than the pool's size")
}

/// Returns the entitlement in bytes for each of the quotas, in their order, in a pool of
/// `size_bytes` bytes. Entitlements are rounded down, so that a few bytes may remain.
pub(crate) fn entitlements(size_bytes: u64, quotas: &[Quota]) -> Vec<u64> {
    let reserves: Vec<u64> = quotas.iter().map(Quota::usable_reserve_bytes).collect();
    let reserved: u128 = reserves.iter().map(|&r| u128::from(r)).sum();
    if reserved > u128::from(size_bytes) {
        let scale = |&r| (u128::from(r) * u128::from(size_bytes) / reserved) as u64;
        return reserves.iter().map(scale).collect();
    }
    let mut free = size_bytes - reserved as u64;
    let mut entitled = reserves;
    let mut open: Vec<usize> = (0..quotas.len())
        .filter(|&i| quotas[i].weight > 0)
        .collect();
    loop {
        let weights: u64 = open.iter().map(|&i| u64::from(quotas[i].weight)).sum();
        if weights == 0 {
            return entitled;
        }
        // In this round, each tenant whose share would reach or exceed its limit gets its limit.
        // The next round divides the remaining bytes among the other tenants.
        let round_free = free;
        let share = |i: usize| mul_div(round_free, u64::from(quotas[i].weight), weights);
        let room = |i: usize, e: &[u64]| quotas[i].limit_bytes.map_or(u64::MAX, |l| l - e[i]);
        let (capped, uncapped): (Vec<usize>, Vec<usize>) =
            open.iter().partition(|&&i| room(i, &entitled) <= share(i));
        if capped.is_empty() {
            for &i in &uncapped {
                entitled[i] += share(i);
            }
            return entitled;
        }
        for &i in &capped {
            let given = room(i, &entitled);
            entitled[i] += given;
            free -= given;
        }
        open = uncapped;
    }
}
