# SPDX-License-Identifier: Apache-2.0 OR MIT
#
# The commands of the project; `make help` lists them. tests/shards.py has the commands of the
# tests, and each component has its own build in its directory.

KERNEL ?= 6.12
CARGO = cargo --config net.retry=5
PROGRAMS = tmemd tmemctl tmem-libvirt tmem-exporter
PYTHON = tests/python
PYTHON_FILES = . ../qemu-dev/tests repo/lint-prose

.DELETE_ON_ERROR:
.PHONY: all help deps deps-test python3 daemon programs qemu module demo bench packages repo \
	check-fast check check-all shard lint lint-python lint-shell simulate fuzz clean

all: daemon qemu module ## build the daemon, the QEMU with the device, and the kernel module

help: ## list these commands
	@sed -n 's/^\([a-z-]*\):.* ## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 22

deps: ## install the Debian packages that the build needs (as root; other users get a list of them)
	@scripts/deps build

deps-test:
	@scripts/deps test

# A minimal Debian has no Python, with which these commands begin.
python3:
	@command -v python3 >/dev/null || scripts/deps build

daemon: ## build tmemd, tmemctl, tmem-hook, tmem-libvirt and tmem-exporter in target/release
	$(CARGO) build --locked --release $(addprefix -p ,$(PROGRAMS))

# The programs as the tests use them: with the profile of all tests, in target/debug.
programs:
	$(CARGO) build --locked $(addprefix -p ,$(PROGRAMS))

qemu: ## build QEMU with the vhost-user-tmem device, in the cache
	qemu-dev/build

module: ## build guest-driver/virtio_tmem.ko for Debian's KERNEL=6.12 cloud kernel
	$(MAKE) -C guest-driver KDIR="$$(tests/kernel prepare $(KERNEL) --key kdir)"

demo: python3 ## run two VMs without and with the device, and compare them; NATIVE=1: at native speed
	tests/bench/run demo $(if $(NATIVE),--native)

bench: python3 ## run the benchmark NAME=..., with ARGS=...; without NAME: list the benchmarks
	tests/bench/run $(NAME) $(ARGS)

NO_QEMU = $(filter 0,$(QEMU))
packages: ## build the Debian packages in build/packages; GUEST=1: only those for guests, QEMU=0
	scripts/deps $(if $(GUEST),guest-packages,packages $(if $(NO_QEMU),,qemu-package))
	packaging/packages $(if $(GUEST),--guest,$(if $(NO_QEMU),--no-qemu)) $(PACKAGES)

repo: ## make a signed apt repository of build/packages in build/repo; KEY=FINGERPRINT in gpg
	@test -n "$(KEY)" || { echo "make repo: name your key with KEY=" >&2; exit 2; }
	packaging/repository --key "$(KEY)" --packages $(or $(PACKAGES),build/packages) build/repo

# ---- tests ------------------------------------------------------------------------------------

check-fast: ## format, clippy and unit tests, without root, VMs or apt
	tests/shards.py fast

check: deps-test programs qemu ## the tests that a change must pass
	tests/shards.py check

shard: python3 ## run the shard NAME=... of the other tests; without NAME: list the shards
	tests/shards.py run $(NAME)

check-all: check ## run all tests that need neither a special kernel nor a nightly compiler (hours)
	tests/shards.py run --all

lint: lint-shell lint-python
	tests/repo/lint-c
	tests/repo/lint-prose
	tests/repo/lint-licence
	tests/repo/lint-crates

# Mode 120000 is a link: its target is checked under its own name, or is a directory.
lint-shell:
	git ls-files -s | sed '/^120000/d; s/^[^\t]*\t//' | xargs -r awk \
		'FNR == 1 && /^#!.*[\/ ](ba)?sh$$/ { print FILENAME }' | xargs -r shellcheck

lint-python:
	cd tests && ./python -m ruff check $(PYTHON_FILES)
	cd tests && ./python -m ruff format --check $(PYTHON_FILES)
	cd tests && ./python -m mypy

SEEDS ?= 100000
FIRST ?= 1
simulate: ## simulate guests and daemon for SEEDS=100000 from FIRST=1; TMEM_SEED=N replays one
	$(CARGO) run --locked --release -p tmem-simulator -- --seeds $(SEEDS) --first $(FIRST)

MINUTES ?= 10
fuzz: ## compare random operations on the pool with a model for MINUTES=10; TMEM_SEED=N replays one
	TMEM_SECONDS=$$((60 * $(MINUTES))) $(CARGO) test --locked -p tmem-pool --lib -- --ignored \
		--nocapture model::random_engine_operations_match_the_model

clean: ## remove the build results in this tree (the cache stays)
	rm -rf target build guest-driver/build
	find guest-driver \( -name '*.o' -o -name '*.ko' -o -name '*.mod*' -o -name '.*.cmd' \) -delete
