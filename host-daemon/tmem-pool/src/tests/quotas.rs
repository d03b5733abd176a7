// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of entitlements: cases whose results were computed by hand, and properties that must hold
//! for random quotas.

use super::rng::{Rng, for_each_seed};
use crate::Quota;
use crate::quota::entitlements;

const fn quota(reserve_bytes: u64, limit_bytes: Option<u64>, weight: u32) -> Quota {
    Quota {
        reserve_bytes,
        limit_bytes,
        weight,
    }
}

#[test]
fn entitlements_of_example_quotas_have_the_expected_values() {
    let cases: &[(&str, u64, &[Quota], &[u64])] = &[
        ("no tenant", 1000, &[], &[]),
        ("one tenant", 1000, &[quota(0, None, 1)], &[1000]),
        (
            "one tenant with a limit",
            1000,
            &[quota(0, Some(300), 1)],
            &[300],
        ),
        (
            "two tenants share by weight",
            1000,
            &[quota(0, None, 1), quota(0, None, 3)],
            &[250, 750],
        ),
        (
            "the reserve comes before the shares by weight",
            1000,
            &[quota(400, None, 1), quota(0, None, 2)],
            &[600, 400],
        ),
        (
            "a tenant without weight gets only its reserve",
            1000,
            &[quota(100, None, 0), quota(0, None, 5)],
            &[100, 900],
        ),
        (
            "no tenant has a weight",
            1000,
            &[quota(100, None, 0), quota(50, None, 0)],
            &[100, 50],
        ),
        (
            "a part that one tenant's limit leaves goes to the others",
            1000,
            &[quota(0, Some(100), 1), quota(0, None, 1), quota(0, None, 2)],
            &[100, 300, 600],
        ),
        (
            "a tenant reaches its limit only with the part that another limit leaves",
            1200,
            &[
                quota(0, Some(100), 1),
                quota(0, Some(500), 1),
                quota(0, None, 1),
            ],
            &[100, 500, 600],
        ),
        (
            "the limit includes the reserve",
            1000,
            &[quota(200, Some(250), 1), quota(0, None, 1)],
            &[250, 750],
        ),
        (
            "a reserve above the limit",
            1000,
            &[quota(500, Some(100), 1), quota(0, None, 1)],
            &[100, 900],
        ),
        (
            "all tenants reach their limits",
            1000,
            &[quota(0, Some(10), 1), quota(5, Some(20), 9)],
            &[10, 20],
        ),
        (
            "the reserves fill the pool",
            1000,
            &[quota(600, None, 7), quota(400, None, 1)],
            &[600, 400],
        ),
        (
            "the reserves exceed the pool: they are scaled down, and weights give nothing",
            500,
            &[
                quota(600, None, 9),
                quota(400, None, 0),
                quota(0, None, 100),
            ],
            &[300, 200, 0],
        ),
        (
            "an empty pool",
            0,
            &[quota(0, None, 1), quota(10, None, 1)],
            &[0, 0],
        ),
        (
            "MiB of the example of docs/quotas.md: db, web, ci",
            8192,
            &[
                quota(1024, None, 100),
                quota(0, None, 200),
                quota(0, Some(1024), 100),
            ],
            &[3072, 4096, 1024],
        ),
        (
            "MiB of the example of docs/quotas.md in a pool of half the size",
            4096,
            &[
                quota(1024, None, 100),
                quota(0, None, 200),
                quota(0, Some(1024), 100),
            ],
            &[1792, 1536, 768],
        ),
        (
            "the largest size, reserve and weights",
            u64::MAX,
            &[quota(u64::MAX, None, u32::MAX), quota(0, None, u32::MAX)],
            &[u64::MAX, 0],
        ),
        (
            "reserves whose sum exceeds 64 bits",
            1000,
            &[quota(u64::MAX, None, 1), quota(u64::MAX, None, 1)],
            &[500, 500],
        ),
    ];
    for (what, size_bytes, quotas, expected) in cases {
        assert_eq!(
            entitlements(*size_bytes, quotas),
            *expected,
            "entitlements() returned wrong entitlements in the case: {what}"
        );
    }
}

fn random(rng: &mut Rng) -> Quota {
    let reserve_bytes = rng.below(2000) * rng.below(2);
    quota(
        reserve_bytes,
        rng.one_in(2).then(|| rng.below(4000)),
        rng.below(5) as u32,
    )
}

#[test]
fn entitlements_respect_pool_size_limits_and_reserves() {
    for_each_seed("entitlements", 2000, |seed| {
        let mut rng = Rng::new(seed);
        let size_bytes = rng.below(20_000);
        let quotas: Vec<Quota> = (0..1 + rng.below(12)).map(|_| random(&mut rng)).collect();
        let entitled = entitlements(size_bytes, &quotas);
        let sum: u64 = entitled.iter().sum();
        assert!(sum <= size_bytes);
        let reserved: u64 = quotas.iter().map(Quota::usable_reserve_bytes).sum();
        for (quota, &entitled) in quotas.iter().zip(&entitled) {
            assert!(entitled <= quota.limit_bytes.unwrap_or(u64::MAX));
            assert!(reserved > size_bytes || entitled >= quota.usable_reserve_bytes());
        }
        // If a tenant with a weight could take more, all bytes of the pool must be divided, except
        // for those that rounding leaves.
        let hungry = quotas.iter().zip(&entitled).any(|(quota, &entitled)| {
            quota.weight > 0 && entitled < quota.limit_bytes.unwrap_or(u64::MAX)
        });
        if hungry && reserved <= size_bytes {
            assert!(
                size_bytes - sum < quotas.len() as u64,
                "the entitlements leave {} B of the pool unused, although a tenant could use more",
                size_bytes - sum
            );
        }
        // For any two tenants below their limits, the parts of their entitlements above their
        // reserves must be proportional to their weights.
        let open: Vec<(u64, u64)> = quotas
            .iter()
            .zip(&entitled)
            .filter(|(quota, entitled)| quota.limit_bytes.is_none_or(|l| l > **entitled))
            .map(|(quota, entitled)| {
                (
                    entitled.saturating_sub(quota.reserve_bytes),
                    u64::from(quota.weight),
                )
            })
            .collect();
        if reserved <= size_bytes {
            for (share, weight) in &open {
                for (other_share, other_weight) in &open {
                    let difference = (share * other_weight).abs_diff(other_share * weight);
                    assert!(
                        difference <= weight + other_weight,
                        "the parts of entitlements above the reserves are not proportional to the \
                         weights: {open:?}"
                    );
                }
            }
        }
    });
}
