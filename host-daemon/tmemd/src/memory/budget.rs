// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Limits on mapped guest memory: one budget of address space and mappings for all VMs, and a
//! maximum size of the memory of each VM.
//!
//! A VM's front end passes files that may be sparse and of any size. Without these limits, a single
//! front end could map files until the daemon has no address space or mappings left for other VMs.
//! A mapping is charged before it is made, and its charge ends after it is unmapped. The charge
//! therefore includes memory tables that wait to be unmapped. Out of scope: the unmapping, see
//! `host/background.rs`, and host memory, which mappings do not use.

use crate::memory::files::GuestFiles;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tmem_pool::ADDRESS_SPACE_TIMES;

/// File with the maximum number of mappings of a process. The sandbox permits the daemon to read it.
pub const MAP_COUNT_PATH: &str = "/proc/sys/vm/max_map_count";

/// Address space in bytes that the kernel gives to a process on x86-64.
const ADDRESS_SPACE_BYTES: u64 = 128 << 40;

/// Maximum number of bytes of guest memory that the daemon maps for all VMs together: half of the
/// daemon's address space. The other half is for the pool and for [`OTHER_BYTES`].
pub const BUDGET_BYTES: u64 = ADDRESS_SPACE_BYTES / 2;

/// Address space in bytes for everything else: one dirty log of at most 2 GiB for each of 1,024
/// VMs, the process itself, and gaps between mappings.
const OTHER_BYTES: u64 = 4 << 40;

/// Largest size in bytes that a pool can have on any host, about 4.3 TiB. A pool reserves a
/// multiple of its largest size as address space.
pub const POOL_BYTES_MAX: u64 =
    (ADDRESS_SPACE_BYTES - BUDGET_BYTES - OTHER_BYTES) / ADDRESS_SPACE_TIMES;

/// Returns the largest size in bytes that a pool can have on a host with `host_bytes` bytes of
/// memory.
pub fn pool_bytes_max(host_bytes: u64) -> u64 {
    host_bytes.min(POOL_BYTES_MAX)
}

/// Largest size of a VM's memory in bytes that can be configured. Unmapping a memory table of this
/// size takes two seconds.
pub const VM_MEMORY_BYTES_MAX: u64 = 8 << 40;

/// Default maximum size of a VM's memory in bytes. Few hosts have more memory. With this default,
/// it takes 16 compromised front ends to use up the budget.
pub const VM_MEMORY_BYTES_DEFAULT: u64 = 1 << 40;

/// Maximum number of memory regions of a VM. It is the number of memory slots that QEMU, its
/// libvhost-user and rust-vmm use. With fewer slots, QEMU gives virtio-mem with dynamic-memslots a
/// single slot. A front end without the protocol feature CONFIGURE_MEM_SLOTS has at most 8 regions.
pub const REGIONS_MAX: usize = 509;

/// The kernel's default of `vm.max_map_count`, the maximum number of mappings of a process.
const MAP_COUNT_DEFAULT: u64 = 65_530;

/// Number of mappings that the budget leaves to the daemon itself. Without VMs the daemon has 240
/// mappings, and each connected VM needs 4 (two for the thread, two for the dirty log and the
/// allocator). 1,024 VMs thus need 4,336. The rest is for clients of the control sockets, and for
/// pages that replace lost pages of guest memory: each of them divides a mapping into three.
const OWN_MAPPINGS: u64 = 8_192;

/// The budget of mapped guest memory that all VMs share.
#[derive(Debug)]
pub struct MemoryBudget {
    bytes: u64,
    mapped_bytes: AtomicU64,
    /// Maximum number of mappings.
    regions: u64,
    mapped_regions: AtomicU64,
}

impl Default for MemoryBudget {
    fn default() -> Self {
        MemoryBudget::new(MAP_COUNT_DEFAULT)
    }
}

impl MemoryBudget {
    /// Creates the budget of a process that may have `map_count` mappings. Half of a very small
    /// number is for regions.
    fn new(map_count: u64) -> MemoryBudget {
        MemoryBudget {
            bytes: BUDGET_BYTES,
            mapped_bytes: AtomicU64::new(0),
            regions: map_count - OWN_MAPPINGS.min(map_count / 2),
            mapped_regions: AtomicU64::new(0),
        }
    }

    /// Creates the budget of a daemon on this host, from `vm.max_map_count`.
    pub fn for_host() -> MemoryBudget {
        let text = std::fs::read_to_string(MAP_COUNT_PATH).unwrap_or_default();
        MemoryBudget::new(text.trim().parse().unwrap_or(MAP_COUNT_DEFAULT))
    }

    /// Returns the maximum number of regions that are mapped for all VMs.
    pub fn regions(&self) -> u64 {
        self.regions
    }

    /// Returns the number of regions that are mapped for all VMs.
    pub fn mapped_regions(&self) -> u64 {
        self.mapped_regions.load(Ordering::Relaxed)
    }

    /// Returns the size of the budget in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the number of bytes of guest memory that are mapped for all VMs.
    pub fn mapped_bytes(&self) -> u64 {
        self.mapped_bytes.load(Ordering::Relaxed)
    }
}

/// Account of the guest memory that the daemon has mapped for one VM, for all its connections
/// together.
#[derive(Debug)]
pub struct MemoryAccount {
    budget: Arc<MemoryBudget>,
    /// Maximum size of the VM's memory in bytes. An operator may change it while the VM is
    /// connected. The memory that is mapped already then stays.
    max_bytes: AtomicU64,
    mapped_bytes: AtomicU64,
    mapped_regions: AtomicU64,
    /// Size of the VM's current memory table in bytes.
    table_bytes: AtomicU64,
    /// Files of the VM's memory.
    pub files: GuestFiles,
}

impl Default for MemoryAccount {
    fn default() -> Self {
        MemoryAccount::new(&Arc::default(), VM_MEMORY_BYTES_DEFAULT)
    }
}

impl MemoryAccount {
    /// Creates the account of a VM that has no memory mapped and may have `max_bytes` of memory.
    pub fn new(budget: &Arc<MemoryBudget>, max_bytes: u64) -> MemoryAccount {
        MemoryAccount {
            budget: budget.clone(),
            max_bytes: AtomicU64::new(max_bytes),
            mapped_bytes: AtomicU64::new(0),
            mapped_regions: AtomicU64::new(0),
            table_bytes: AtomicU64::new(0),
            files: GuestFiles::default(),
        }
    }

    /// Returns the maximum size of the VM's memory in bytes.
    pub fn max_bytes(&self) -> u64 {
        self.max_bytes.load(Ordering::Relaxed)
    }

    /// Changes the maximum size of the VM's memory.
    pub fn set_max_bytes(&self, bytes: u64) {
        self.max_bytes.store(bytes, Ordering::Relaxed);
    }

    /// Returns the number of bytes that are mapped for the VM, in its current memory table and in
    /// tables that wait to be unmapped.
    pub fn mapped_bytes(&self) -> u64 {
        self.mapped_bytes.load(Ordering::Relaxed)
    }

    /// Returns the size of the VM's current memory table in bytes.
    pub fn table_bytes(&self) -> u64 {
        self.table_bytes.load(Ordering::Relaxed)
    }

    /// Sets the size of the VM's current memory table.
    pub fn set_table_bytes(&self, bytes: u64) {
        self.table_bytes.store(bytes, Ordering::Relaxed);
    }

    /// Returns the number of regions that are mapped for the VM, in its current memory table and in
    /// tables that wait to be unmapped.
    pub fn mapped_regions(&self) -> u64 {
        self.mapped_regions.load(Ordering::Relaxed)
    }

    /// Returns true if the VM has more memory mapped outside of its current table than its maximum.
    /// `table_bytes` is the size of the current table. The caller must then unmap the table that
    /// was replaced at once, instead of letting it wait to be unmapped.
    ///
    /// Memory that the waiting tables share with the current table counts as current. They may
    /// therefore have up to twice the maximum together: the maximum, and the table that was current
    /// when the last of them began to wait. With the current table and the next one, which is
    /// mapped before it becomes current, the VM has at most four times its maximum mapped.
    pub fn is_backlogged(&self, table_bytes: u64) -> bool {
        self.mapped_bytes().saturating_sub(table_bytes) > self.max_bytes()
    }

    /// Charges a region of `bytes` bytes, which is about to be mapped and added to a memory table
    /// of `table_bytes` bytes.
    ///
    /// # Errors
    /// The VM's memory would exceed its maximum, or the mapped memory or regions of all VMs the
    /// budget. Nothing is charged.
    pub fn charge(
        self: &Arc<MemoryAccount>,
        table_bytes: u64,
        bytes: u64,
    ) -> Result<MemoryCharge, OverBudget> {
        let budget = &self.budget;
        let refused = |what: &str, remedy: &str| OverBudget {
            text: format!(
                "{what}: with this region of {bytes} bytes its memory has {} bytes, and its \
                 maximum is {}. {} of the {} bytes of address space for the memory of all VMs are \
                 in use. {remedy}",
                table_bytes.saturating_add(bytes),
                self.max_bytes(),
                budget.mapped_bytes(),
                budget.bytes,
            ),
        };
        let table = table_bytes.checked_add(bytes);
        if table.is_none_or(|table| table > self.max_bytes()) {
            return Err(refused(
                "the VM has too much memory",
                "Give the VM less memory, or raise memory_max of its [[vm]] or --vm; for a libvirt \
                 domain, raise its <maxMemory>",
            ));
        }
        if !add_within(&budget.mapped_regions, 1, budget.regions) {
            return Err(OverBudget {
                text: format!(
                    "all VMs together have {} memory regions, and the daemon can map {}. This VM \
                     has {} of them. Raise vm.max_map_count (sysctl) and restart tmemd, or give VMs \
                     fewer memory slots (virtio-mem without dynamic-memslots, fewer DIMMs)",
                    budget.mapped_regions(),
                    budget.regions,
                    self.mapped_regions(),
                ),
            });
        }
        if !add_within(&budget.mapped_bytes, bytes, budget.bytes) {
            budget.mapped_regions.fetch_sub(1, Ordering::Relaxed);
            return Err(refused(
                "the memory of all VMs needs too much address space",
                "Stop a VM, or find the VM with too much memory in memory_mapped_bytes of \
                 `tmemctl stats`, and lower its memory_max",
            ));
        }
        self.mapped_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.mapped_regions.fetch_add(1, Ordering::Relaxed);
        Ok(MemoryCharge {
            account: self.clone(),
            bytes,
        })
    }
}

/// Charge of one mapping. Dropping the value ends the charge.
#[derive(Debug)]
pub struct MemoryCharge {
    account: Arc<MemoryAccount>,
    bytes: u64,
}

impl Drop for MemoryCharge {
    fn drop(&mut self) {
        let MemoryCharge { account, bytes } = self;
        account.mapped_bytes.fetch_sub(*bytes, Ordering::Relaxed);
        account.mapped_regions.fetch_sub(1, Ordering::Relaxed);
        let all = &account.budget;
        all.mapped_bytes.fetch_sub(*bytes, Ordering::Relaxed);
        all.mapped_regions.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Adds `more` to a counter unless the result exceeds `max`. Returns whether it was added.
fn add_within(counter: &AtomicU64, more: u64, max: u64) -> bool {
    let within = |count: u64| count.checked_add(more).filter(|count| *count <= max);
    let order = Ordering::Relaxed;
    counter.fetch_update(order, order, within).is_ok()
}

/// Reason why a region is not mapped. The text gives all numbers and says what to do.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub struct OverBudget {
    text: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the accounts of two VMs that share a budget of `bytes` bytes.
    fn two_vms(bytes: u64, max_bytes: u64) -> [Arc<MemoryAccount>; 2] {
        let budget = Arc::new(MemoryBudget {
            bytes,
            ..MemoryBudget::default()
        });
        [(); 2].map(|()| Arc::new(MemoryAccount::new(&budget, max_bytes)))
    }

    #[test]
    fn a_vm_maps_at_most_its_maximum_and_all_vms_at_most_the_budget() {
        let [one, other] = two_vms(100, 60);
        let held = one
            .charge(0, 60)
            .expect("memory up to the maximum was refused");
        let error = one
            .charge(60, 1)
            .expect_err("a region above the VM's maximum was accepted");
        for part in [
            "1 bytes",
            "61 bytes",
            "maximum is 60",
            "60 of the 100",
            "memory_max",
        ] {
            let error = error.to_string();
            assert!(
                error.contains(part),
                "the error does not contain {part:?}: {error}"
            );
        }
        let error = other
            .charge(0, 41)
            .expect_err("a region above the budget of all VMs was accepted");
        for part in [
            "41 bytes",
            "maximum is 60",
            "60 of the 100",
            "tmemctl stats",
        ] {
            let error = error.to_string();
            assert!(
                error.contains(part),
                "the error does not contain {part:?}: {error}"
            );
        }
        assert_eq!(other.mapped_bytes(), 0, "a refused region was charged");
        let rest = other
            .charge(0, 40)
            .expect("a region that fits the rest of the budget was refused");
        drop(held);
        assert_eq!((one.mapped_bytes(), one.budget.mapped_bytes()), (0, 40));
        drop(rest);
        assert_eq!(one.budget.mapped_bytes(), 0);
        for (table_bytes, bytes) in [(u64::MAX, 1), (1, u64::MAX), (0, u64::MAX)] {
            let charged = one.charge(table_bytes, bytes);
            charged.expect_err("a region was accepted whose size overflows the sum");
        }
    }

    #[test]
    fn all_vms_together_map_at_most_the_regions_of_the_budget() {
        let budget = Arc::new(MemoryBudget {
            regions: 3,
            ..MemoryBudget::default()
        });
        let [one, other] = [(); 2].map(|()| Arc::new(MemoryAccount::new(&budget, 100)));
        let region = |account: &Arc<MemoryAccount>| account.charge(0, 1);
        let held = [region(&one), region(&one), region(&other)];
        assert!(
            held.iter().all(Result::is_ok),
            "a region within the budget was refused: {held:?}"
        );
        let error = region(&one).expect_err("a region above the budget was accepted");
        let error = error.to_string();
        for part in [
            "3 memory regions",
            "can map 3",
            "2 of them",
            "vm.max_map_count",
        ] {
            assert!(
                error.contains(part),
                "the error does not contain {part:?}: {error}"
            );
        }
        drop(held);
        // A region that is refused because of its size does not stay charged.
        one.charge(0, 101)
            .expect_err("memory above the VM's maximum was accepted");
        let big = Arc::new(MemoryAccount::new(&budget, u64::MAX));
        big.charge(0, BUDGET_BYTES + 1)
            .expect_err("memory above the budget was accepted");
        assert_eq!((budget.mapped_regions(), one.mapped_regions()), (0, 0));
    }

    #[test]
    fn the_pool_of_a_large_host_leaves_address_space_to_vms() {
        const TIB: u64 = 1 << 40;
        assert_eq!(pool_bytes_max(TIB), TIB);
        assert_eq!(pool_bytes_max(24 * TIB), POOL_BYTES_MAX);
        for host_tib in [1, 4, 9, 10, 24, 64] {
            let pool_bytes = pool_bytes_max(host_tib * TIB) * ADDRESS_SPACE_TIMES;
            assert!(
                pool_bytes + OTHER_BYTES + BUDGET_BYTES <= ADDRESS_SPACE_BYTES,
                "a host with {host_tib} TiB has too little address space for VMs"
            );
        }
        // The kernel provides this address space to the test, too.
        let mut config = tmem_pool::EngineConfig::new(1 << 20, 1);
        config.size_max_bytes = pool_bytes_max(24 * TIB);
        let engine = tmem_pool::Engine::new(config).expect("cannot create the pool");
        // The program itself may be in the middle of the address space, so it need not be contiguous.
        let vms = BUDGET_BYTES / VM_MEMORY_BYTES_MAX;
        let guest = |_| vm_memory::MmapRegion::<()>::new(VM_MEMORY_BYTES_MAX as usize);
        let guests: Result<Vec<_>, _> = (0..vms).map(guest).collect();
        guests.expect("the pool leaves too little address space to VMs");
        assert_eq!(engine.size_max_bytes(), POOL_BYTES_MAX);
    }

    #[test]
    fn the_budget_leaves_mappings_to_the_daemon() {
        for (map_count, regions) in [(65_530, 57_338), (1 << 20, 1_040_384), (1_000, 500), (0, 0)] {
            assert_eq!(MemoryBudget::new(map_count).regions(), regions);
        }
        assert!(MemoryBudget::for_host().regions() > REGIONS_MAX as u64);
    }

    #[test]
    fn a_changed_maximum_applies_to_the_next_region() {
        let [one, _] = two_vms(100, 10);
        one.charge(0, 11)
            .expect_err("a region above the VM's maximum was accepted");
        one.set_max_bytes(11);
        let held = one
            .charge(0, 11)
            .expect("memory up to the new maximum was refused");
        one.set_max_bytes(5);
        assert_eq!(
            one.mapped_bytes(),
            11,
            "lowering the maximum changed the charge of memory that is already mapped"
        );
        one.charge(11, 1)
            .expect_err("a region above the lowered maximum was accepted");
        drop(held);
    }

    #[test]
    fn concurrent_charges_do_not_exceed_the_budget() {
        let accounts = two_vms(10, 10);
        let most = std::thread::scope(|scope| {
            let threads = accounts.each_ref().map(|account| {
                scope.spawn(move || {
                    let mut most = 0;
                    for round in 0..20_000 {
                        // The charge may be refused, because the two VMs compete for the budget.
                        let _held = account.charge(0, 1 + round % 10);
                        most = most.max(account.budget.mapped_bytes());
                    }
                    most
                })
            });
            threads.map(|thread| thread.join().expect("a charging thread panicked"))
        });
        assert!(
            most.iter().all(|most| *most <= 10),
            "two VMs charged up to {most:?} bytes, more than their budget of 10"
        );
        assert_eq!(accounts[0].budget.mapped_bytes(), 0);
    }
}
