# SPDX-License-Identifier: Apache-2.0 OR MIT
#
# The commands of the project. `make help` lists them; each part's own build lives in its folder.

KERNEL ?= 6.12
CARGO = cargo --config net.retry=5
MANIFEST = --manifest-path host-daemon/Cargo.toml --locked
PYTHON = tests/python
PYTEST = cd tests && ./python -m pytest --ignore=vm/test_native.py unit vm

.DELETE_ON_ERROR:
.PHONY: all help deps deps-test daemon qemu module demo bench bench-path bench-timing bench-slice bench-vms bench-guest bench-density bench-life check check-host check-guest check-kvm check-libvirt check-ops \
	check-guest-long check-all check-newest check-kernel-debug check-miri check-sim check-sim-long \
	lint lint-rust lint-c lint-shell lint-python lint-prose lint-licence test-rust \
	test-driver fuzz fuzz-guests clean

all: daemon qemu module ## build the daemon, the QEMU with the device, and the kernel module

help: ## this list
	@sed -n 's/^\([a-z-]*\):.* ## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 22

deps: ## install the Debian packages that building needs (as root; else name them and stop)
	@scripts/deps build

deps-test:
	@scripts/deps test

daemon: ## tmemd, tmemctl, tmem-hook, tmem-libvirt and tmem-exporter, in host-daemon/target/release
	$(CARGO) build --release $(MANIFEST) -p tmemd -p tmemctl -p tmem-hook -p tmem-libvirt -p tmem-exporter

qemu: ## QEMU with the vhost-user-tmem device, in the cache
	qemu-dev/build

module: ## the module for Debian's KERNEL=6.12 cloud kernel: guest-driver/virtio_tmem.ko
	$(MAKE) -C guest-driver KDIR="$$(tests/kernel prepare $(KERNEL) --key kdir)"

demo: deps all ## two virtual machines, one pool: without and with the device
	$(PYTHON) tests/demo.py

# The file trees of two related servers; TREES="A B" for others, TREES= for none.
TREES ?= $$(scripts/two-servers || echo)
bench: deps ## what the engine costs beside its codec, its memory and zram; ARGS="--json" for the figures
	trees="$(TREES)"; \
	$(CARGO) run --release $(MANIFEST) -p tmem-bench -- engine $${trees:+--trees $$trees} $(ARGS)

bench-path: deps ## the path from a virtqueue to the engine and back, beside zram and memcached; ARGS="--json"
	$(CARGO) run --release $(MANIFEST) -p tmem-bench -- path $(ARGS)

bench-timing: deps ## whether a guest can tell by time what a VM of another trust domain has; ARGS="--json"
	$(CARGO) run --release $(MANIFEST) -p tmem-bench -- timing $(ARGS)

bench-slice: deps ## how long a VM waits for a page beside another that keeps the worker busy; ARGS="--json"
	$(CARGO) run --release $(MANIFEST) -p tmem-bench -- slice $(ARGS)

bench-vms: deps ## 256 VMs on one daemon: what it takes, a storm of connections, a large one that leaves; ARGS="--help"
	$(CARGO) build --release $(MANIFEST) -p tmemd -p tmem-bench
	host-daemon/target/release/tmem-bench vms $(ARGS)

bench-guest: deps all ## what the guest driver costs and gains; JSON=FILE for the figures
	$(PYTHON) tests/bench_guest.py

bench-density: deps all ## four VMs with one pool, against the same host bytes as RAM, and KSM (25 minutes, as root); JSON=FILE
	$(PYTHON) tests/bench_density.py

bench-life: deps all ## migration with and without the device, and how soon a killed daemon's successor serves
	cd tests && PYTHONPATH=vm ./python bench_life.py $(ARGS)

# ---- tests ------------------------------------------------------------------------------------

check: check-host check-guest ## what must pass before a change lands (under 30 minutes)

check-host: deps-test lint test-rust check-sim test-driver ## formats, lints, unit and property tests, fake guests

check-guest: deps-test all ## virtual machines: device, driver, torture
	$(PYTEST) --kernel $(KERNEL) -m smoke

check-kvm: deps-test all ## the VM tests on KVM, where a guest boots on it; says that it was skipped where none does
	cd tests && ./python -m pytest --kvm --kernel $(KERNEL) --ignore=vm/test_native.py vm

check-libvirt: deps-test all ## domains of a stock libvirtd: attach, start, hits, quota, detach
	cd tests && ./python -m pytest --kernel $(KERNEL) --not-all-skipped vm/test_libvirt.py

check-ops: deps-test all ## commands, a VM's figures, estimates, metrics before a real Prometheus, top in a real terminal
	$(CARGO) test $(MANIFEST) -p tmem-control -p tmemctl -p tmem-exporter
	$(CARGO) test $(MANIFEST) -p tmemctl --test terminal -p tmem-exporter --test prometheus -p tmemd --test journal -- --ignored
	$(CARGO) test --release $(MANIFEST) -p tmem-exporter --test cost -- --ignored --nocapture
	TMEM_SEEDS=8 $(CARGO) test --release $(MANIFEST) -p tmem-bench replay_test
	cd tests && ./python -m pytest --kernel $(KERNEL) vm/test_figures.py

check-newest: ## fail if Debian 12, 13 or their backports offer a kernel series that the driver does not serve
	@tests/kernel newest

DURATION ?= 2h
KERNELS ?= $(KERNEL)
check-guest-long: deps-test all ## torture for DURATION=2h on all file systems (KERNELS=6.12)
	cd tests && PYTHONPATH=vm ./python long.py --duration $(DURATION) --kernels $(KERNELS)

# Everything, in shards by name: `make check-all` runs all, `make check-all SHARD=vm-6.12-1` one.
# Each takes less than 20 minutes on two cores. With the kernel of make check, what it left out;
# with the others, all but what is about QEMU and the tests themselves.
VM_SHARDS = vm-6.12-1 vm-6.12-2 vm-6.12-3 vm-6.12-4 vm-6.1-1 vm-6.1-2 vm-6.1-3 vm-6.1-4 vm-7.2-1 vm-7.2-2 vm-7.2-3 vm-7.2-4 vm-7.2-5 \
	vm-7.3-1 vm-7.3-2 vm-7.3-3 vm-7.3-4 vm-7.3-5
SHARDS = $(VM_SHARDS) native qemu-life qemu-newest ops miri fuzz
# Kernels that check themselves, built from source if they are not in the cache.
CHECKING = kernel-debug kernel-kcsan
# Kernels with the configuration of other vendors, built in the same way.
VENDORS = kernel-fedora kernel-rhel kernel-ubuntu
# A kernel with the driver built in, without ftrace and modules, built in the same way.
INTREE = kernel-intree
# Of all these .ci/run takes as many as fit, in turn; not what needs a nightly compiler, and not the
# kernels that are built first.
# Those of 7.3 and the native guests join when each has passed once.
TURNS = $(filter-out native miri fuzz vm-7.3-%,$(SHARDS))
SHARD ?= $(SHARDS)

check-all: check $(addprefix shard-,$(SHARD)) ## everything; SHARD=NAME adds one shard to check

.PHONY: $(addprefix shard-,$(SHARDS) $(CHECKING) $(VENDORS) $(INTREE)) shards
shards: ## names of the shards that take turns in .ci/run
	@echo $(TURNS)

# vm-6.1-2 is the second of as many parts as there are names with 6.1.
kernel_of = $(firstword $(subst -, ,$1))
ANY_KERNEL = $(patsubst %,--ignore=vm/test_%.py,device errors harness kvm libvirt memory_map memory_slots migration pressure snapshot \
	time upgrade watchdog)
$(addprefix shard-,$(VM_SHARDS)): shard-vm-%: deps-test all
	$(PYTEST) --kernel $(call kernel_of,$*) \
		$(if $(filter $(KERNEL),$(call kernel_of,$*)),-m "not smoke",$(ANY_KERNEL)) \
		--shard $(lastword $(subst -, ,$*))/$(words $(filter vm-$(call kernel_of,$*)-%,$(VM_SHARDS)))

# Guests in user-mode Linux; the first run builds the kernel.
shard-native: deps-test daemon
	cd tests && ./python -m pytest vm/test_native.py

$(addprefix shard-,$(CHECKING)): shard-kernel-%: deps-test all
	tests/kernel prepare $* --key release
	cd tests && ./python -m pytest --kernel $* vm/test_debug_kernel.py

$(addprefix shard-,$(VENDORS)): shard-kernel-%: deps-test all
	tests/kernel prepare $* --key release
	cd tests && ./python -m pytest --kernel $* vm/test_vendor_config.py

shard-kernel-intree: deps-test daemon qemu
	tests/kernel prepare intree --key release
	cd tests && ./python -m pytest --kernel intree vm/test_intree.py

check-kernel-debug: shard-kernel-debug ## the torture on a kernel with lockdep, KASAN and kmemleak

shard-qemu-life: deps-test qemu
	qemu-dev/qtests
	QEMU=$$(qemu-dev/build --print) $(PYTHON) -m pytest qemu-dev/tests

shard-ops: check-ops

# Status 3: a version that nobody has adopted yet does not pass. That is reported and no failure.
shard-qemu-newest: deps-test all
	scripts/deps newest
	qemu-dev/try-newest || [ $$? -eq 3 ]

# The pool's allocators in Miri: undefined behaviour, data races, orders of memory that are too weak.
MIRI = cargo +nightly --config net.retry=5 miri
shard-miri: deps-test
	$(MIRI) --version >/dev/null 2>&1 || \
		rustup toolchain install nightly --profile minimal --component miri --component rust-src
	$(MIRI) test $(MANIFEST) -p tmem-pool --lib -- heap:: index::arena:: evict::ghost::

check-miri: shard-miri ## the pool's allocators in Miri (installs Rust's nightly if there is none)

# Hostile guests, three minutes for each target from the corpus on, after a build of some five.
shard-fuzz:
	scripts/deps fuzz
	host-daemon/fuzz/run 3

lint: lint-rust lint-c lint-shell lint-python lint-prose lint-licence

lint-rust:
	cargo fmt --manifest-path host-daemon/Cargo.toml --all --check
	rustfmt --check --edition 2024 host-daemon/fuzz/fuzz_targets/*.rs
	$(CARGO) clippy $(MANIFEST) --workspace --all-targets -- -D warnings

lint-c:
	scripts/lint-c

lint-shell:
	git ls-files | xargs -r awk 'FNR == 1 && /^#!.*[\/ ](ba)?sh$$/ { print FILENAME }' | xargs -r shellcheck

lint-python:
	cd tests && ./python -m ruff check . ../qemu-dev/tests ../scripts/lint-prose
	cd tests && ./python -m ruff format --check . ../qemu-dev/tests ../scripts/lint-prose
	cd tests && MYPYPATH=vm ./python -m mypy harness demo.py bench_guest.py bench_density.py bench_life.py long.py conftest.py kernel unit vm

lint-prose:
	scripts/lint-prose

lint-licence:
	scripts/lint-licence

# Then what depends on the event loop again, with the one that is not the default; and the pool's threads, in a
# thousand orders: half a minute each. What this machine clearly has no test is skipped for.
test-rust: export TMEM_NO_SKIPS = $(shell scripts/no-skips)
test-rust:
	$(CARGO) test $(MANIFEST) --workspace
	TMEM_EVENT_LOOP=epoll $(CARGO) test $(MANIFEST) -p tmemd --test drain --test hang_up --test liars --test random
	$(CARGO) test $(MANIFEST) -p tmem-pool --features shuttle --lib -- interleavings

check-sim: ## guests, faults and the real daemon on virtual time: seeds, and that broken rules are found
	$(CARGO) test --release $(MANIFEST) -p tmem-world
	$(CARGO) run --release $(MANIFEST) -p tmem-world

SEEDS ?= 100000
FIRST ?= 1
check-sim-long: ## the same for SEEDS=100000 from FIRST=1 on; TMEM_SEED=N replays one
	$(CARGO) run --release $(MANIFEST) -p tmem-world -- --seeds $(SEEDS) --first $(FIRST)

MINUTES ?= 10
fuzz: ## random operations on the pool against a model, new seeds for MINUTES=10; TMEM_SEED=N replays one
	TMEM_SECONDS=$$((60 * $(MINUTES))) $(CARGO) test $(MANIFEST) -p tmem-pool --lib -- --ignored --nocapture model::fuzz

fuzz-guests: ## hostile guests and VMMs, guided by coverage, each target for MINUTES=10 (installs nightly and cargo-fuzz); TARGETS=rings
	scripts/deps fuzz
	host-daemon/fuzz/run $(MINUTES) $(TARGETS)

test-driver:
	$(MAKE) -C guest-driver test

clean: ## remove what was built here (the cache stays)
	rm -rf host-daemon/target
	$(MAKE) -C guest-driver clean
