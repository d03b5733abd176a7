# SPDX-License-Identifier: Apache-2.0 OR MIT
#
# The commands of the project. `make help` lists them; each part's own build lives in its folder.

KERNEL ?= 6.12
CARGO = cargo --config net.retry=5
MANIFEST = --manifest-path host-daemon/Cargo.toml --locked
PYTHON = tests/python
PYTEST = cd tests && ./python -m pytest unit vm

.DELETE_ON_ERROR:
.PHONY: all help deps deps-test daemon qemu module demo bench bench-guest check check-host check-guest check-libvirt check-ops \
	check-guest-long check-all check-kernel-debug check-miri check-sim check-sim-long \
	lint lint-rust lint-c lint-shell lint-python lint-licence test-rust \
	test-driver fuzz clean

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

bench-guest: deps all ## what the guest driver costs and gains; JSON=FILE for the figures
	$(PYTHON) tests/bench_guest.py

# ---- tests ------------------------------------------------------------------------------------

check: check-host check-guest ## what must pass before a change lands (under 30 minutes)

check-host: deps-test lint test-rust check-sim test-driver ## formats, lints, unit and property tests, fake guests

check-guest: deps-test all ## virtual machines: device, driver, torture
	$(PYTEST) --kernel $(KERNEL) -m smoke

check-libvirt: deps-test all ## domains of a stock libvirtd: attach, start, hits, quota, detach
	cd tests && ./python -m pytest --kernel $(KERNEL) --not-all-skipped vm/test_libvirt.py

check-ops: deps-test ## commands, figures, metrics before a real Prometheus, top in a real terminal
	$(CARGO) test $(MANIFEST) -p tmem-control -p tmemctl -p tmem-exporter
	$(CARGO) test $(MANIFEST) -p tmemctl --test terminal -p tmem-exporter --test prometheus -- --ignored

DURATION ?= 2h
KERNELS ?= $(KERNEL)
check-guest-long: deps-test all ## torture for DURATION=2h on all file systems (KERNELS=6.12)
	cd tests && PYTHONPATH=vm ./python long.py --duration $(DURATION) --kernels $(KERNELS)

# Everything, in shards by name: `make check-all` runs all, `make check-all SHARD=vm-6.12-1` one.
# Each takes less than 20 minutes on two cores. With the kernel of make check, what it left out;
# with the others, all but what is about QEMU and the tests themselves.
VM_SHARDS = vm-6.12-1 vm-6.12-2 vm-6.12-3 vm-6.1-1 vm-6.1-2 vm-6.1-3 vm-6.1-4 vm-7.2-1 vm-7.2-2 vm-7.2-3 vm-7.2-4 vm-7.2-5
SHARDS = $(VM_SHARDS) qemu-life qemu-newest ops miri
# Kernels that check themselves, built from source if they are not in the cache.
CHECKING = kernel-debug kernel-kcsan
# Of all these .ci/run takes as many as fit, in turn; not what needs a nightly compiler, and not the
# kernels that are built first.
TURNS = $(filter-out miri,$(SHARDS))
SHARD ?= $(SHARDS)

check-all: check $(addprefix shard-,$(SHARD)) ## everything; SHARD=NAME adds one shard to check

.PHONY: $(addprefix shard-,$(SHARDS) $(CHECKING)) shards
shards: ## names of the shards that take turns in .ci/run
	@echo $(TURNS)

# vm-6.1-2 is the second of as many parts as there are names with 6.1.
kernel_of = $(firstword $(subst -, ,$1))
ANY_KERNEL = $(patsubst %,--ignore=vm/test_%.py,device errors harness libvirt memory_map pressure snapshot)
$(addprefix shard-,$(VM_SHARDS)): shard-vm-%: deps-test all
	$(PYTEST) --kernel $(call kernel_of,$*) \
		$(if $(filter $(KERNEL),$(call kernel_of,$*)),-m "not smoke",$(ANY_KERNEL)) \
		--shard $(lastword $(subst -, ,$*))/$(words $(filter vm-$(call kernel_of,$*)-%,$(VM_SHARDS)))

$(addprefix shard-,$(CHECKING)): shard-kernel-%: deps-test all
	tests/kernel prepare $* --key release
	cd tests && ./python -m pytest --kernel $* vm/test_debug_kernel.py

check-kernel-debug: shard-kernel-debug ## the torture on a kernel with lockdep, KASAN and kmemleak

shard-qemu-life: deps-test qemu
	QEMU=$$(qemu-dev/build --print) $(PYTHON) -m pytest qemu-dev/tests

shard-ops: check-ops

shard-qemu-newest: deps-test
	scripts/deps newest
	qemu-dev/build --newest

# The pool's allocator in Miri: undefined behaviour, data races, orders of memory that are too weak.
MIRI = cargo +nightly --config net.retry=5 miri
shard-miri: deps-test
	$(MIRI) --version >/dev/null 2>&1 || \
		rustup toolchain install nightly --profile minimal --component miri --component rust-src
	$(MIRI) test $(MANIFEST) -p tmem-pool --lib -- heap::

check-miri: shard-miri ## the pool's allocator in Miri (installs Rust's nightly if there is none)

lint: lint-rust lint-c lint-shell lint-python lint-licence

lint-rust:
	cargo fmt --manifest-path host-daemon/Cargo.toml --all --check
	$(CARGO) clippy $(MANIFEST) --workspace --all-targets -- -D warnings

lint-c:
	scripts/lint-c

lint-shell:
	git ls-files | xargs -r awk 'FNR == 1 && /^#!.*[\/ ](ba)?sh$$/ { print FILENAME }' | xargs -r shellcheck

lint-python:
	cd tests && ./python -m ruff check . ../qemu-dev/tests
	cd tests && ./python -m ruff format --check . ../qemu-dev/tests
	cd tests && MYPYPATH=vm ./python -m mypy harness demo.py bench_guest.py long.py conftest.py kernel unit vm

lint-licence:
	scripts/lint-licence

# Then the pool's threads again, in a thousand orders: half a minute.
test-rust:
	$(CARGO) test $(MANIFEST) --workspace
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

test-driver:
	$(MAKE) -C guest-driver test

clean: ## remove what was built here (the cache stays)
	rm -rf host-daemon/target
	$(MAKE) -C guest-driver clean
