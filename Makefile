# BurstAttention: every task of the repository, the same here and in CI. `make help` lists them.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory --no-builtin-rules

VENV := .venv
PY := $(VENV)/bin/python
PACKAGE := jax_plugin/burst_attention
LIBRARY := $(PACKAGE)/libburst_attention_ffi.so
IMAGES := $(PACKAGE)/images
PYTHON_BENCH := $(PY)
# On the command line alone: some shells have a variable of that name.
HOST :=
TARGET := $(if $(CARGO_TARGET_DIR),$(CARGO_TARGET_DIR),target)
RUST := Cargo.toml Cargo.lock $(shell find src ffi kernels/Cargo.toml kernels/src \
    -name '*.rs' -o -name '*.toml')
KERNELS := Cargo.toml Cargo.lock $(shell find kernels/Cargo.toml kernels/src kernels/compiler/src \
    -name '*.rs' -o -name '*.toml')
HOST_PACKAGE := $(TARGET)/$(HOST)-package
# Stands before a cargo that compiles the CUDA kernels, and says where .venv has the tools. cargo and
# rustdoc can't use make's job server, so MAKEFLAGS is unset.
KERNEL_TOOLS = unset MAKEFLAGS MFLAGS && eval "$$($(PY) kernels/toolchain.py)" &&
# Always the same packages and the same profile, so that tests, lint and the compiler of the CUDA
# kernels share what they build.
WORKSPACE := --profile checked --workspace --exclude burst-attention-peak
KERNEL_IMAGES = $(KERNEL_TOOLS) cargo build --quiet $(WORKSPACE) --bin kernel-images && \
    $(TARGET)/checked/kernel-images $(or $(1),$(IMAGES)) $(TARGET)/kernel-images

# No folder of the machine that builds stands in the library: its messages name source files.
REMAP := --remap-path-prefix=$(CURDIR)=burst-attention \
    --remap-path-prefix=$(if $(CARGO_HOME),$(CARGO_HOME),$(HOME)/.cargo)/registry/src=crates

# Crates' build scripts look for $PYTHON before the project's own one; PYTHON here only makes .venv.
unexport PYTHON
export PYTHONDONTWRITEBYTECODE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export CARGO_TERM_PROGRESS_WHEN := never
SAY = @printf '\n\033[1m== %s\033[0m\n'
PIP_INSTALL = @$(PY) -m pip install --quiet

.PHONY: help build images demo demo-linear test test-full test-exhaustive test-wheel wheel bench
.PHONY: schedule-bench linear-bench kernel-bench kernel-quality gpu-check host-cost
.PHONY: lint format clean host-package test-rust test-python test-rust-full test-python-full

help:  ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' Makefile | expand -t 21

# pip and cargo side by side: packages do not need the library, nor the library them.
build: $(VENV)/headers  ## make .venv, compile, install: what CPU devices need
	@$(MAKE) --silent $(if $(filter -j%,$(MAKEFLAGS)),,-j2) $(LIBRARY) $(VENV)/installed

images: $(TARGET)/images-complete  ## the CUDA kernels' images for all targets: what GPUs need

demo: build  ## train a transformer, its sequence sharded over 8 devices; flags in DEMO="--steps 9"
	$(SAY) "demo: training over 8 CPU devices"
	@$(PY) examples/train_long_context.py $(DEMO)

demo-linear: DEMO += --attention linear
demo-linear: demo  ## the same with linear attention, on 131,072-token sequences

# Rust and Python side by side. Each one's output comes when it is done.
test: $(VENV)/headers  ## a check of every kind
	@$(MAKE) --silent -j2 $(LIBRARY) $(VENV)/installed $(VENV)/dev
	@$(MAKE) --silent -j2 --output-sync=target test-rust test-python
	$(SAY) "all tests passed"

test-full: lint test-rust-full test-python-full test-wheel  ## lint, and the long rest of the tests
	$(SAY) "all long tests passed"

test-exhaustive: build  ## whole products of the cases (days)
	@$(PY) -m pytest -m "" --exhaustive $(PYTEST)

test-rust: $(VENV)/dev
	$(SAY) "Rust: core, CUDA executor, XLA custom calls, CUDA kernels on an interpreter"
	@$(KERNEL_TOOLS) cargo test --quiet $(WORKSPACE)

test-rust-full: $(VENV)/dev images
	$(SAY) "Rust: images of all targets, long cases of the interpreter"
	@$(KERNEL_TOOLS) cargo test --quiet $(WORKSPACE) -- --ignored

kernel-quality: images  ## what the compiler made of each CUDA kernel; WRITE=1: accept it
	@$(KERNEL_TOOLS) cargo build --quiet $(WORKSPACE) --bin kernel-quality && \
	    $(TARGET)/checked/kernel-quality $(IMAGES) $(if $(WRITE),--write)

test-python: build $(VENV)/dev
	$(SAY) "Python: pytest, on 8 CPU devices (PYTEST=... adds arguments)"
	@$(PY) -m pytest $(PYTEST)

test-python-full: build $(VENV)/dev $(IMAGES)/sm_90.safetensors
	$(SAY) "Python: the long tests"
	@$(PY) -m pytest -m long $(PYTEST)

lint: $(VENV)/dev  ## rustfmt, clippy, ruff, mypy
	$(SAY) "lint: rustfmt, clippy, ruff, mypy"
	@cargo fmt --all --check
	@$(KERNEL_TOOLS) cargo clippy --quiet $(WORKSPACE) --all-targets -- -D warnings
	@cargo clippy --quiet --release -p burst-attention-peak --all-targets -- -D warnings
	@$(VENV)/bin/ruff check --quiet
	@$(VENV)/bin/ruff format --check --quiet || { $(VENV)/bin/ruff format --diff --quiet; exit 1; }
	@$(VENV)/bin/mypy

format: $(VENV)/dev  ## rustfmt, ruff: rewrite files
	@cargo fmt --all
	@$(VENV)/bin/ruff check --fix --quiet
	@$(VENV)/bin/ruff format

wheel: $(if $(HOST),host-package,build images)  ## dist/*.whl, for this kind of host or HOST=aarch64
	$(SAY) "wheel"
	@rm -rf dist
	@$(PY) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist \
	    $(if $(HOST),$(HOST_PACKAGE),./jax_plugin)
	@ls -sh dist

# The package for another kind of host, apart from the one for this host. The linker is what Debian
# and Ubuntu have in gcc-aarch64-linux-gnu; rustup target add gives the Rust library.
host-package: $(VENV)/kernels
	$(SAY) "Rust library and CUDA kernels for $(HOST)"
	@rm -rf $(HOST_PACKAGE) && mkdir -p $(HOST_PACKAGE)
	@tar c -C jax_plugin --exclude='*.so' --exclude=images . | tar x -C $(HOST_PACKAGE)
	@RUSTFLAGS="$(REMAP) $${RUSTFLAGS-}" cargo build --quiet --release -p burst-attention-ffi \
	    --target $(HOST)-unknown-linux-gnu \
	    --config 'target.$(HOST)-unknown-linux-gnu.linker="$(HOST)-linux-gnu-gcc"'
	@cp $(TARGET)/$(HOST)-unknown-linux-gnu/release/$(notdir $(LIBRARY)) \
	    $(HOST_PACKAGE)/burst_attention
	@$(call KERNEL_IMAGES,$(HOST_PACKAGE)/burst_attention/images) --host $(HOST)

test-wheel: wheel  ## install the wheel with the oldest and the newest JAX and run the tests
	@for which in oldest newest; do .ci/test-wheel $(PY) $$which $(PYTEST); done

bench: build  ## measure; PYTHON_BENCH=... is a Python with torch
	$(SAY) "benchmarks (BENCH=--quick: a look only)"
	@cargo build --quiet --release -p burst-attention-peak
	@PYTHONPATH=jax_plugin $(PYTHON_BENCH) benchmarks/run.py \
	    --peak $(TARGET)/release/burst-attention-peak $(BENCH)

schedule-bench: build  ## all schedules, and several processes, against one ring
	@PYTHONPATH=jax_plugin $(PYTHON_BENCH) benchmarks/schedules.py $(BENCH)

linear-bench: build  ## linear attention against plain JAX
	@PYTHONPATH=jax_plugin $(PYTHON_BENCH) benchmarks/linear.py $(BENCH)

kernel-bench: build images  ## the CUDA kernels on an NVIDIA GPU; PYTHON_BENCH with torch, cuda-bindings
	@$(PYTHON_BENCH) benchmarks/kernels.py --library $(LIBRARY) $(BENCH)

gpu-check:  ## the ring on an NVIDIA GPU; PYTHON_BENCH with jax[cuda13] and the wheel
	@$(PYTHON_BENCH) benchmarks/gpu_check.py $(BENCH)

host-cost: $(VENV)/headers  ## host time that issuing a ring to a GPU takes
	@cargo run --quiet --release -p burst-attention-host-cost

clean:  ## remove all that was made, .venv too
	@rm -rf $(VENV) target dist out $(LIBRARY) $(IMAGES)

# What needs making: packages, the library, the package in the environment, images.

$(VENV)/headers: requirements/build.txt requirements/constraints.txt
	@.ci/check-tools
	$(SAY) "Python packages of the build into $(VENV)"
	@.ci/make-venv $(VENV) "$(PYTHON)"
	$(PIP_INSTALL) -r requirements/build.txt
	@touch $@

$(VENV)/ready: $(VENV)/headers requirements/demo.txt
	$(SAY) "Python packages of the demo into $(VENV)"
	$(PIP_INSTALL) -r requirements/demo.txt
	@touch $@

$(VENV)/kernels: $(VENV)/ready requirements/kernels.txt
	$(SAY) "assembler of the CUDA kernels into $(VENV) (once, 650 MB)"
	$(PIP_INSTALL) -r requirements/kernels.txt
	@touch $@

$(VENV)/dev: $(VENV)/kernels requirements/dev.txt
	$(SAY) "Python packages of the tests into $(VENV)"
	$(PIP_INSTALL) -r requirements/dev.txt
	@touch $@

$(LIBRARY): $(RUST) $(VENV)/headers
	$(SAY) "Rust library"
	@RUSTFLAGS="$(REMAP) $${RUSTFLAGS-}" cargo build --quiet --release -p burst-attention-ffi
	@cp $(TARGET)/release/$(@F) $@.new && mv $@.new $@

$(VENV)/installed: jax_plugin/pyproject.toml $(PACKAGE)/_version.py $(VENV)/ready
	$(PIP_INSTALL) --no-deps --no-build-isolation --editable jax_plugin
	@touch $@

$(IMAGES)/sm_90.safetensors: $(KERNELS) $(VENV)/kernels
	$(SAY) "CUDA kernels for sm_90"
	@$(KERNEL_IMAGES) sm_90

$(TARGET)/images-complete: $(KERNELS) $(VENV)/kernels
	$(SAY) "CUDA kernels for all targets"
	@$(KERNEL_IMAGES)
	@touch $@
