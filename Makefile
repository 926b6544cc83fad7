# BurstAttention: every task of the repository, the same here and in CI. `make help` lists them.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory --no-builtin-rules

VENV := .venv
PY := $(VENV)/bin/python
PACKAGE := jax_plugin/burst_attention
LIBRARY := $(PACKAGE)/libburst_attention_ffi.so
PYTHON_BENCH := $(PY)
TARGET := $(if $(CARGO_TARGET_DIR),$(CARGO_TARGET_DIR),target)
RUST := Cargo.toml Cargo.lock $(shell find src ffi kernels/build.rs kernels/Cargo.toml kernels/src \
    -name '*.rs' -o -name '*.toml')
# Before a cargo that compiles the CUDA kernels: tells it where .venv has its tools.
KERNEL_TOOLS = eval "$$($(PY) kernels/toolchain.py)" &&
# Always the same packages and features, so that one build serves build, test, lint and wheel.
WITH_KERNELS := --release -p burst-attention-ffi -p burst-attention-kernels \
    --features burst-attention-ffi/cuda
DECODE_CHECK := -p burst-attention-decode-check
# The crates with tests that need no images, in one selection for the same reason.
PLAIN := -p burst-attention -p burst-attention-interpreter -p burst-attention-device-tests

# Crates' build scripts look for $PYTHON before the project's own one; PYTHON here only makes .venv.
unexport PYTHON
export PYTHONDONTWRITEBYTECODE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export CARGO_TERM_PROGRESS_WHEN := never
SAY = @printf '\n\033[1m== %s\033[0m\n'

.PHONY: help build demo demo-linear test test-full test-wheel wheel bench schedule-bench linear-bench kernel-bench lint lint-rust lint-python format clean
.PHONY: test-rust test-ffi test-python kernel-quality gpu-check host-cost

help:  ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' Makefile | expand -t 19

build: $(LIBRARY) $(VENV)/installed  ## make .venv, compile, install; all others imply it

demo: build  ## train a transformer, its sequence sharded over 8 devices; flags in DEMO="--steps 9"
	$(SAY) "demo: training over 8 CPU devices"
	@$(PY) examples/train_long_context.py $(DEMO)

demo-linear: DEMO += --attention linear
demo-linear: demo  ## the same with linear attention, on 131,072-token sequences

test: build lint test-rust test-ffi test-python  ## all tests and lint
	$(SAY) "all tests passed"

test-full: PYTEST += --full
test-full: test  ## the same with the whole product of the correctness cases (hours)

test-rust: $(VENV)/ready
	$(SAY) "core, CUDA executor, what the CUDA kernels compute on an interpreter: cargo test"
	@$(KERNEL_TOOLS) cargo test --quiet --profile checked $(PLAIN)

test-ffi: $(VENV)/ready
	$(SAY) "XLA custom calls, the decoder against XLA's own C++ header, CUDA kernels: cargo test"
	@$(KERNEL_TOOLS) cargo test --quiet $(WITH_KERNELS) $(DECODE_CHECK)

kernel-quality: $(VENV)/ready  ## what the compiler made of each CUDA kernel; WRITE=1: accept it
	@$(KERNEL_TOOLS) cargo build --quiet $(WITH_KERNELS) && \
	    $(TARGET)/release/kernel-quality $(if $(WRITE),--write)

test-python: build
	$(SAY) "Python: pytest, on 8 CPU devices (PYTEST=... adds arguments)"
	@$(PY) -m pytest $(PYTEST)

lint: lint-rust lint-python  ## rustfmt, clippy, ruff, mypy

lint-rust: $(VENV)/ready
	$(SAY) "lint: rustfmt, clippy"
	@cargo fmt --all --check
	@$(KERNEL_TOOLS) cargo clippy --quiet --release $(PLAIN) -p burst-attention-host-cost \
	    --all-targets -- -D warnings
	@cargo clippy --quiet --release -p burst-attention-peak --all-targets -- -D warnings
	@$(KERNEL_TOOLS) cargo clippy --quiet $(WITH_KERNELS) $(DECODE_CHECK) --all-targets -- -D warnings

lint-python: $(VENV)/ready
	$(SAY) "lint: ruff, mypy"
	@$(VENV)/bin/ruff check --quiet
	@$(VENV)/bin/ruff format --check --quiet || { $(VENV)/bin/ruff format --diff --quiet; exit 1; }
	@$(VENV)/bin/mypy

format: $(VENV)/ready  ## rustfmt, ruff: rewrite files
	@cargo fmt --all
	@$(VENV)/bin/ruff check --fix --quiet
	@$(VENV)/bin/ruff format

wheel: $(VENV)/ready  ## dist/*.whl, for any Python 3 on this kind of machine
	$(SAY) "wheel"
	@rm -rf dist
	@$(PY) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist ./jax_plugin
	@ls -sh dist

test-wheel: wheel  ## install the wheel with the oldest and the newest JAX and run the tests
	@for which in oldest newest; do .ci/test-wheel $(PY) $$which $(PYTEST); done

bench: $(LIBRARY) $(VENV)/installed  ## measure; PYTHON_BENCH=... is a Python with torch
	$(SAY) "benchmarks (BENCH=--quick: a look only)"
	@cargo build --quiet --release -p burst-attention-peak
	@PYTHONPATH=jax_plugin $(PYTHON_BENCH) benchmarks/run.py \
	    --peak $(TARGET)/release/burst-attention-peak $(BENCH)

schedule-bench: $(LIBRARY) $(VENV)/installed  ## all schedules, and several processes, against one ring
	@PYTHONPATH=jax_plugin $(PYTHON_BENCH) benchmarks/schedules.py $(BENCH)

linear-bench: $(LIBRARY) $(VENV)/installed  ## linear attention against plain JAX
	@PYTHONPATH=jax_plugin $(PYTHON_BENCH) benchmarks/linear.py $(BENCH)

kernel-bench: $(LIBRARY)  ## the CUDA kernels on an NVIDIA GPU; PYTHON_BENCH with torch, cuda-bindings
	@$(PYTHON_BENCH) benchmarks/kernels.py --library $(LIBRARY) $(BENCH)

gpu-check:  ## the ring on an NVIDIA GPU; PYTHON_BENCH with jax[cuda13] and the wheel
	@$(PYTHON_BENCH) benchmarks/gpu_check.py $(BENCH)

host-cost:  ## host time that issuing a ring to a GPU takes
	@cargo run --quiet --release -p burst-attention-host-cost

clean:  ## remove all that was made, .venv too
	@rm -rf $(VENV) target dist out $(LIBRARY)

# What needs making: the environment, the library in the package, the package in the environment.

$(VENV)/ready: requirements/dev.txt requirements/constraints.txt
	@.ci/check-tools
	$(SAY) "Python packages into $(VENV) (once, about 1.2 GB)"
	@.ci/make-venv $(VENV) "$(PYTHON)"
	@$(PY) -m pip install --quiet -r requirements/dev.txt
	@touch $@

$(LIBRARY): $(RUST) $(VENV)/ready
	$(SAY) "Rust library"
	@$(KERNEL_TOOLS) cargo build --quiet $(WITH_KERNELS)
	@cp $(TARGET)/release/$(@F) $@.new && mv $@.new $@

$(VENV)/installed: jax_plugin/pyproject.toml $(PACKAGE)/_version.py $(VENV)/ready
	@$(PY) -m pip install --quiet --no-deps --no-build-isolation --editable jax_plugin
	@touch $@
