// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Errors of the engine. Each is a type of its own for callers, and has a message for people.

use std::fmt;

/// Error: the tenant has no live pool with the requested number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoPool;

impl fmt::Display for NoPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the tenant has no live pool of this id")
    }
}

impl std::error::Error for NoPool {}

/// Error: a pool cannot be created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CreateError {
    /// The tenant already has a live pool with the requested number.
    Exists,
    /// The tenant already has [`POOLS_PER_TENANT_MAX`](crate::POOLS_PER_TENANT_MAX) live pools.
    Limit,
}

impl fmt::Display for CreateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CreateError::Exists => f.write_str("the tenant has a live pool of this id"),
            CreateError::Limit => write!(
                f,
                "the tenant has {} live pools, which is the limit",
                crate::config::POOLS_PER_TENANT_MAX
            ),
        }
    }
}

impl std::error::Error for CreateError {}

/// Error: a tenant's reserve does not fit beside the reserves of the other tenants.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AdmissionError {
    /// Name of the tenant whose reserve does not fit.
    pub tenant: String,
    /// Reserve in bytes of the tenant whose reserve does not fit. If the tenant's limit is smaller,
    /// the field has the limit.
    pub reserve_bytes: u64,
    /// Bytes of the pool that the reserves of the other tenants leave.
    pub available_bytes: u64,
}

impl fmt::Display for AdmissionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "tenant {:?} asks for a reserve of {} bytes, but the other tenants' reserves leave {} \
             bytes of the pool: lower a reserve or enlarge the pool",
            self.tenant, self.reserve_bytes, self.available_bytes
        )
    }
}

impl std::error::Error for AdmissionError {}
