// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Quotas of VMs: conversion between the control interface and the pool, and description in
//! messages.

use crate::config::settings::check_quota;
use tmem_pool::Quota;

/// Converts a quota from the type of the control interface to that of the pool.
///
/// # Errors
/// A value is out of range. The error text names the key and the value.
pub fn from_api(quota: &tmem_control::Quota) -> Result<Quota, String> {
    let bytes = |key: &str, value: i64| {
        u64::try_from(value).map_err(|_| format!("{key}={value} is negative"))
    };
    let out_of_range = |_| format!("weight={} is out of range", quota.weight);
    let quota = Quota {
        reserve_bytes: bytes("reserve_bytes", quota.reserve_bytes)?,
        limit_bytes: quota
            .limit_bytes
            .map(|limit| bytes("limit_bytes", limit))
            .transpose()?,
        weight: u32::try_from(quota.weight).map_err(out_of_range)?,
    };
    check_quota(&quota)?;
    Ok(quota)
}

/// Converts a quota from the type of the pool to that of the control interface, whose integers are
/// signed.
pub fn to_api(quota: &Quota) -> tmem_control::Quota {
    let int = |bytes| i64::try_from(bytes).unwrap_or(i64::MAX);
    tmem_control::Quota {
        reserve_bytes: int(quota.reserve_bytes),
        limit_bytes: quota.limit_bytes.map(int),
        weight: i64::from(quota.weight),
    }
}

/// Describes a quota in the text of log messages and events.
pub fn describe(quota: &tmem_control::Quota) -> String {
    let limit = quota.limit_bytes.map(|bytes| format!("{bytes} bytes"));
    format!(
        "reserve {} bytes, limit {}, weight {}",
        quota.reserve_bytes,
        limit.as_deref().unwrap_or("none"),
        quota.weight
    )
}
