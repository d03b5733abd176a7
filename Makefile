# SPDX-License-Identifier: Apache-2.0 OR MIT
#
# The commands of the project. `make help` lists them; each component has its own build in its directory.

KERNEL ?= 6.12
CARGO = cargo --config net.retry=5
MANIFEST = --locked
PYTHON = tests/python
# Number of tests that run at the same time. A test with one guest keeps about one processor busy.
JOBS ?= 2
PYTEST = cd tests && ./python -m pytest -n $(JOBS) --dist worksteal --ignore=vm/test_native.py --ignore=vm/test_compatibility.py repo vm

.DELETE_ON_ERROR:
.PHONY: all help deps deps-test daemon qemu module demo bench bench-path bench-timing bench-slice bench-policies bench-vms bench-guest bench-native bench-locks bench-density bench-proof bench-kvm bench-life packages check-packages dist repo check check-host check-guest check-kvm check-libvirt check-ops \
	check-guest-long check-all check-newest check-kernel-debug check-miri check-sim check-sim-long \
	lint lint-rust lint-c lint-shell lint-python lint-prose lint-licence lint-crates test-rust \
	test-driver fuzz fuzz-guests clean

all: daemon qemu module ## build the daemon, the QEMU with the device, and the kernel module

help: ## list these commands
	@sed -n 's/^\([a-z-]*\):.* ## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 22

deps: ## install the Debian packages that the build needs (as root; other users get a list of them)
	@scripts/deps build

deps-test:
	@scripts/deps test

daemon: ## build tmemd, tmemctl, tmem-hook, tmem-libvirt and tmem-exporter in target/release
	$(CARGO) build --release $(MANIFEST) -p tmemd -p tmemctl -p tmem-hook -p tmem-libvirt -p tmem-exporter

qemu: ## build QEMU with the vhost-user-tmem device, in the cache
	qemu-dev/build

module: ## build guest-driver/virtio_tmem.ko for Debian's KERNEL=6.12 cloud kernel
	$(MAKE) -C guest-driver KDIR="$$(tests/kernel prepare $(KERNEL) --key kdir)"

# NATIVE=1 runs the demo's guests in user-mode Linux instead of QEMU.
demo: $(if $(NATIVE),deps-test daemon,deps all) ## run two VMs without the device, then with it and one pool, and compare them; NATIVE=1: at native speed
	NATIVE=$(NATIVE) $(PYTHON) tests/demo.py

# Directories of two related servers, which the benchmark puts as two VMs. TREES="A B" names other
# directories. TREES= leaves out this part of the benchmark.
TREES ?= $$(scripts/two-servers || echo)
bench: deps ## measure the storage engine, compared with copying, hashing, lz4 and zram; ARGS="--json" prints JSON
	trees="$(TREES)"; \
	$(CARGO) run --release $(MANIFEST) -p tmem-bench -- engine $${trees:+--trees $$trees} $(ARGS)

bench-path: deps ## measure the path from a virtqueue to the engine and back, compared with zram and memcached; ARGS="--json"
	$(CARGO) run --release $(MANIFEST) -p tmem-bench -- path $(ARGS)

bench-timing: deps ## measure whether timing tells a guest which pages a VM of another trust domain has; ARGS="--full-pool"
	$(CARGO) run --release $(MANIFEST) -p tmem-bench -- timing $(ARGS)

bench-slice: deps ## measure how long a VM waits for a page while another VM keeps the worker busy; ARGS="--json"
	$(CARGO) run --release $(MANIFEST) -p tmem-bench -- slice $(ARGS)

bench-policies: deps ## compare the eviction policy with S3-FIFO, SIEVE and the optimum by hit ratios; ARGS="--json"
	$(CARGO) run --release $(MANIFEST) -p tmem-bench -- policies tests/traces/*.zst $(ARGS)

bench-vms: deps ## measure 256 VMs on one daemon: memory and CPU, many connections at once, removal of a large VM; ARGS="--help"
	$(CARGO) build --release $(MANIFEST) -p tmemd -p tmem-bench
	target/release/tmem-bench vms $(ARGS)

bench-guest: deps all ## measure costs and gains of the guest driver; JSON=FILE writes the figures
	$(PYTHON) tests/bench_guest.py

bench-native: deps-test daemon ## measure driver and path in native guests (user-mode Linux); JSON=FILE writes the figures
	JSON=$(JSON) $(PYTHON) tests/bench_native.py

bench-locks: deps all ## count what processors share in the driver: locks, processor time of kernel threads (builds a kernel at first); ARGS="--only locks"
	JSON=$(JSON) $(PYTHON) tests/bench_locks.py $(ARGS)

bench-density: deps all ## compare four VMs with one pool, with as much additional RAM, and with KSM (25 minutes, as root); JSON=FILE
	$(PYTHON) tests/bench_density.py

bench-proof: deps-test daemon ## compare the pool with every rival in native guests (40 minutes, as root); ARGS="--only stream", JSON=FILE, PAGE=FILE
	JSON=$(JSON) $(PYTHON) -m proof $(if $(PAGE),--page $(PAGE)) $(ARGS)

bench-kvm: deps all ## measure the workloads of bench-proof with QEMU on KVM, or on TCG where no guest boots on KVM; ARGS=--quick
	JSON=$(JSON) $(PYTHON) -m proof --kvm $(ARGS)

bench-life: deps all ## measure migration with and without the device, and the time until a restarted daemon serves
	cd tests && PYTHONPATH=vm ./python bench_life.py $(ARGS)

NO_QEMU = $(filter 0,$(QEMU))
packages: ## build the Debian packages in build/packages; PACKAGES=DIRECTORY, GUEST=1: only those for guests, QEMU=0: without QEMU
	scripts/deps $(if $(GUEST),guest-packages,packages $(if $(NO_QEMU),,qemu-package))
	scripts/packages $(if $(GUEST),--guest,$(if $(NO_QEMU),--no-qemu)) $(PACKAGES)

COMMIT ?= HEAD
dist: ## make the source archive with all crates, its bill of materials and checksums in build/dist; COMMIT=v0.2.0
	scripts/deps dist
	scripts/dist --commit $(COMMIT)

repo: ## make a signed apt repository of build/packages in build/repo; KEY=FINGERPRINT of your key in gpg
	@test -n "$(KEY)" || { echo "make repo: name your key with KEY=, see scripts/repository --help" >&2; exit 2; }
	scripts/repository --key "$(KEY)" --packages $(or $(PACKAGES),build/packages) build/repo

# ---- tests ------------------------------------------------------------------------------------

check: check-host check-guest ## run the tests that a change must pass (under 30 minutes)

check-host: deps-test lint test-rust check-sim test-driver ## check format and lints, run unit and property tests, also with simulated guests

check-guest: deps-test all ## run the short VM tests: device, driver, torture
	$(PYTEST) --kernel $(KERNEL) -m smoke

check-kvm: deps-test all ## run the VM tests on KVM; skips them with a reason if no guest boots on KVM
	cd tests && ./python -m pytest --kvm --kernel $(KERNEL) --ignore=vm/test_native.py --ignore=vm/test_compatibility.py vm

check-libvirt: deps-test all ## test domains of a stock libvirtd: attach, start, hits, quota, detach
	cd tests && ./python -m pytest --kernel $(KERNEL) --not-all-skipped vm/test_libvirt.py

check-ops: deps-test all ## test commands, figures, estimates, timing, metrics with a real Prometheus, tmemctl top in a real terminal
	$(CARGO) test $(MANIFEST) -p tmem-control -p tmemctl -p tmem-exporter
	$(CARGO) test $(MANIFEST) -p tmemctl --test terminal -p tmem-exporter --test prometheus -p tmemd --test integration -- --ignored
	$(CARGO) test --release $(MANIFEST) -p tmem-exporter --test cost -- --ignored --nocapture
	TMEM_SEEDS=8 $(CARGO) test --release $(MANIFEST) -p tmem-bench replay_test
	$(CARGO) test --release $(MANIFEST) -p tmem-bench timing -- --nocapture
	cd tests && ./python -m pytest --kernel $(KERNEL) vm/test_figures.py

SUITES ?= bookworm
IN ?= namespaces host guest
check-packages: packages $(if $(filter host guest,$(IN)),qemu) ## install, run, upgrade and purge the packages in Debian systems and VMs (as root); SUITES="bookworm trixie" IN=host
	for suite in $(SUITES); do for kind in $(IN); do \
		scripts/check-packages --in $$kind --suite $$suite $(PACKAGES) || [ $$? -eq 77 ] || exit 1; done; done

check-newest: ## fail if Debian 12, 13 or their backports offer a kernel series that the driver does not serve
	@tests/kernel newest

DURATION ?= 2h
KERNELS ?= $(KERNEL)
check-guest-long: deps-test all ## run the torture program for DURATION=2h on all file systems (KERNELS=6.12)
	cd tests && PYTHONPATH=vm ./python long.py --duration $(DURATION) --kernels $(KERNELS)

# All tests, divided into shards: `make check-all` runs all shards, `make check-all SHARD=vm-6.12-1`
# one. A shard takes less than 20 minutes on two cores. The shards of KERNEL run the VM tests that
# make check leaves out. The shards of other kernels run all VM tests except ANY_KERNEL.
VM_SHARDS = vm-6.12-1 vm-6.12-2 vm-6.12-3 vm-6.12-4 vm-6.1-1 vm-6.1-2 vm-6.1-3 vm-6.1-4 vm-7.2-1 vm-7.2-2 vm-7.2-3 vm-7.2-4 vm-7.2-5 \
	vm-7.3-1 vm-7.3-2 vm-7.3-3 vm-7.3-4 vm-7.3-5
PACKAGE_SHARDS = packages-namespaces-bookworm packages-namespaces-trixie packages-host-bookworm packages-guest-bookworm \
	packages-guest-trixie packages-qemu
SHARDS = $(VM_SHARDS) retain native qemu-life qemu-newest ops compatibility $(PACKAGE_SHARDS) reproducible container miri fuzz
# Kernels with debugging checks, built from source if they are not in the cache.
CHECKING = kernel-debug kernel-kcsan
# Kernels with configurations like those of other vendors, built from source if they are not in the
# cache.
VENDORS = kernel-fedora kernel-rhel kernel-ubuntu
# Kernels with the driver built in, without ftrace and modules, built from source if they are not in
# the cache.
INTREE = kernel-intree kernel-intree-7.3
# .ci/run runs these shards in rotation, as many as fit into its time. The shards that need a nightly
# compiler, or a kernel that is built first, are left out.
TURNS = $(filter-out native miri fuzz,$(SHARDS))
SHARD ?= $(SHARDS)

check-all: check $(addprefix shard-,$(SHARD)) ## run all tests; SHARD=NAME runs make check and one shard

.PHONY: $(addprefix shard-,$(SHARDS) $(CHECKING) $(VENDORS) $(INTREE)) shards
shards: ## print the names of the shards that .ci/run runs in rotation
	@echo $(TURNS)

# A shard vm-KERNEL-N runs the N-th part of the tests; the number of parts is the number of shards with
# that kernel. ANY_KERNEL ignores tests whose result does not depend on the guest's kernel.
kernel_of = $(firstword $(subst -, ,$1))
ANY_KERNEL = $(patsubst %,--ignore=vm/test_%.py,device errors harness kvm libvirt memory_map memory_slots migration pressure snapshot \
	time upgrade watchdog)
$(addprefix shard-,$(VM_SHARDS)): shard-vm-%: deps-test all
	$(PYTEST) --kernel $(call kernel_of,$*) \
		$(if $(filter $(KERNEL),$(call kernel_of,$*)),-m "not smoke",$(ANY_KERNEL)) \
		--shard $(lastword $(subst -, ,$*))/$(words $(filter vm-$(call kernel_of,$*)-%,$(VM_SHARDS)))

# Runs the coherence tests with retained pages: TMEM_RETAIN in tests/README.md.
RETAINING = files mounts torture direct_writes fs_errors fio
shard-retain: deps-test all
	cd tests && TMEM_RETAIN=on ./python -m pytest -n $(JOBS) --dist worksteal --kernel $(KERNEL) $(RETAINING:%=vm/test_%.py)

# Runs the tests of guests in user-mode Linux. The first run builds the guests' kernel.
shard-native: deps-test daemon
	$(CARGO) build --release $(MANIFEST) -p tmem-sim --bin vhost-proxy
	cd tests && ./python -m pytest vm/test_native.py

$(addprefix shard-,$(CHECKING)): shard-kernel-%: deps-test all
	tests/kernel prepare $* --key release
	cd tests && ./python -m pytest --kernel $* vm/test_debug_kernel.py

$(addprefix shard-,$(VENDORS)): shard-kernel-%: deps-test all
	tests/kernel prepare $* --key release
	cd tests && ./python -m pytest --kernel $* vm/test_vendor_config.py

$(addprefix shard-,$(INTREE)): shard-kernel-%: deps-test daemon qemu
	tests/kernel prepare $* --key release
	cd tests && ./python -m pytest --kernel $* vm/test_intree.py

check-kernel-debug: shard-kernel-debug ## run the torture program on a kernel with lockdep, KASAN and kmemleak

shard-qemu-life: deps-test qemu
	qemu-dev/qtests
	QEMU=$$(qemu-dev/build --print) $(PYTHON) -m pytest qemu-dev/tests

shard-ops: check-ops

# Each shard tests the packages in one way, so that a run of CI has time for one. Building QEMU's packages
# takes ten minutes: one shard does it, the others use those that are in the cache.
QEMU_IS_BUILT = $$(qemu-dev/package --print >/dev/null 2>&1 && echo 1 || echo 0)
$(filter shard-packages-host-% shard-packages-guest-%,$(addprefix shard-,$(PACKAGE_SHARDS))): qemu
$(filter-out shard-packages-qemu,$(addprefix shard-,$(PACKAGE_SHARDS))): shard-packages-%: deps-test
	$(MAKE) packages QEMU=$(QEMU_IS_BUILT)
	scripts/check-packages --in $(subst -, --suite ,$*) $(PACKAGES)

shard-packages-qemu: deps-test
	$(MAKE) packages
	scripts/check-packages --in namespaces $(PACKAGES)

# Two builds of the packages from the same source.
shard-reproducible: deps-test
	$(MAKE) packages QEMU=0
	scripts/check-reproducible $(PACKAGES)

# The instructions of the Containerfile.
shard-container:
	scripts/deps packages
	scripts/check-container

# Programs of the previous release and of this tree together.
shard-compatibility: deps-test all
	scripts/deps packages
	cd tests && ./python -m pytest --kernel $(KERNEL) vm/test_compatibility.py

# qemu-dev/try-newest ends with status 3 if tests fail only with a QEMU version that is not in
# known-good. The shard reports this and does not fail.
shard-qemu-newest: deps-test all
	scripts/deps newest
	qemu-dev/try-newest || [ $$? -eq 3 ]

# Miri finds undefined behaviour, data races and memory orders that are too weak.
MIRI = cargo +nightly --config net.retry=5 miri
shard-miri: deps-test
	$(MIRI) --version >/dev/null 2>&1 || \
		rustup toolchain install nightly --profile minimal --component miri --component rust-src
	$(MIRI) test $(MANIFEST) -p tmem-pool --lib -- heap:: index::arena:: evict::ghost::

check-miri: shard-miri ## run tests of the pool's allocators in Miri (installs nightly Rust if it is missing)

# Fuzzes each target for three minutes, starting from the corpus. The build takes about five minutes.
shard-fuzz:
	scripts/deps fuzz
	tests/fuzz/targets/run 3

lint: lint-rust lint-c lint-shell lint-python lint-prose lint-licence lint-crates

lint-rust:
	cargo fmt --all --check
	rustfmt --check --edition 2024 tests/fuzz/targets/fuzz_targets/*.rs
	$(CARGO) clippy $(MANIFEST) --workspace --all-targets -- -D warnings

lint-c:
	scripts/lint-c

# Mode 120000 is a link: its target is checked under its own name, or is a directory.
lint-shell:
	git ls-files -s | sed '/^120000/d; s/^[^\t]*\t//' | xargs -r awk 'FNR == 1 && /^#!.*[\/ ](ba)?sh$$/ { print FILENAME }' | xargs -r shellcheck

lint-python:
	cd tests && ./python -m ruff check . ../qemu-dev/tests ../scripts/lint-prose ../scripts/sbom
	cd tests && ./python -m ruff format --check . ../qemu-dev/tests ../scripts/lint-prose ../scripts/sbom
	cd tests && MYPYPATH=vm ./python -m mypy harness demo.py bench_guest.py bench_native.py native_bench.py bench_retain.py bench_locks.py bench_density.py bench_life.py long.py conftest.py kernel proof repo vm

lint-prose:
	scripts/lint-prose

lint-licence:
	scripts/lint-licence

lint-crates: ## check licences, duplicates, sources and known vulnerabilities of the crates (installs cargo-deny in the cache)
	scripts/lint-crates

# The second line repeats the tests that depend on the event loop with epoll, which is not the default. The
# third line tries a thousand interleavings of the pool's threads. Each of these lines takes half a minute. TMEM_NO_SKIPS
# names features of this machine: a test that needs only these fails instead of being skipped.
test-rust: export TMEM_NO_SKIPS = $(shell scripts/no-skips)
test-rust:
	$(CARGO) test $(MANIFEST) --workspace
	TMEM_EVENT_LOOP=epoll $(CARGO) test $(MANIFEST) -p tmemd --test integration drain:: hang_up:: liars:: random::
	$(CARGO) test $(MANIFEST) -p tmem-pool --features shuttle --lib -- interleavings

check-sim: ## simulate guests, faults and the real daemon on virtual time, and check that broken rules are found
	$(CARGO) test --release $(MANIFEST) -p tmem-world
	$(CARGO) run --release $(MANIFEST) -p tmem-world

SEEDS ?= 100000
FIRST ?= 1
check-sim-long: ## run the simulator for SEEDS=100000 seeds from FIRST=1 on; TMEM_SEED=N replays one
	$(CARGO) run --release $(MANIFEST) -p tmem-world -- --seeds $(SEEDS) --first $(FIRST)

MINUTES ?= 10
fuzz: ## compare random operations on the pool with a model, for MINUTES=10; TMEM_SEED=N replays one
	TMEM_SECONDS=$$((60 * $(MINUTES))) $(CARGO) test $(MANIFEST) -p tmem-pool --lib -- --ignored --nocapture model::random_engine_operations_match_the_model

fuzz-guests: ## fuzz the daemon as a hostile guest or VMM, each target for MINUTES=10 (installs nightly and cargo-fuzz); TARGETS=rings
	scripts/deps fuzz
	tests/fuzz/targets/run $(MINUTES) $(TARGETS)

test-driver:
	$(MAKE) -C guest-driver test

clean: ## remove the build results in this tree (the cache stays)
	rm -rf target
	$(MAKE) -C guest-driver clean
