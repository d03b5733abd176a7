// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checks which program loads libvirt's library. Loading it and its 50 dependencies would delay each
//! start of a VM, which waits for the hook.

#[test]
fn only_the_bridge_loads_the_library_of_libvirt() {
    let loads_libvirt = |program: &str| {
        let bytes = std::fs::read(program).expect("cannot read the program");
        bytes.windows(10).any(|part| part == b"libvirt.so")
    };
    assert!(!loads_libvirt(env!("CARGO_BIN_EXE_tmem-hook")));
    #[cfg(feature = "bridge")]
    assert!(loads_libvirt(env!("CARGO_BIN_EXE_tmem-libvirt")));
}
