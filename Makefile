# Every task of the repository, the same on a workstation and in CI. `make help` lists the tasks.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory --no-builtin-rules

VENV := .venv
TRAINERS := $(VENV)/trainers
PY := $(VENV)/bin/python
PACKAGE := jax_plugin/burst_attention
LIBRARY := $(PACKAGE)/libburst_attention_ffi.so
IMAGES := $(PACKAGE)/images
PYTHON_BENCH := $(PY)
# HOST, TARGETS, TARGET, NCCL, ATTENTION and POOL count on the command line only, because some shells have
# variables of such names.
NCCL :=
ATTENTION :=
POOL :=
HOST :=
TARGETS :=
TARGET :=
BUILD := $(if $(CARGO_TARGET_DIR),$(CARGO_TARGET_DIR),target)
RUST := Cargo.toml Cargo.lock $(shell find src ffi kernels/Cargo.toml kernels/src \
    -name '*.rs' -o -name '*.toml')
KERNELS := Cargo.toml Cargo.lock $(shell find kernels/Cargo.toml kernels/src kernels/compiler/src \
    -name '*.rs' -o -name '*.toml')
# What `build` makes, for targets that run in parallel.
BUILT := $(LIBRARY) $(VENV)/installed
# The package for tests: its library checks overflow and assertions.
CHECKED_PACKAGE := $(BUILD)/checked-package/burst_attention
CHECKED_LIBRARY := $(CHECKED_PACKAGE)/$(notdir $(LIBRARY))
TEST_PACKAGE := $(BUILD)/test-package
# Copies the package without what `build` and `images` make into an empty folder.
COPY_SOURCES = rm -rf $(1) && mkdir -p $(1) && \
    tar c -C jax_plugin --exclude='*.so' --exclude=images . | tar x -C $(1)
# Gives a folder with a library the package's Python files, as links. They are made anew each time,
# because files come and go.
LINK_SOURCES = find $(1) -type l -delete && for file in $(CURDIR)/$(PACKAGE)/*; do case $$file in \
    */images|*.so) ;; *) ln -s $$file $(1) ;; esac; done
# Precedes each cargo command that compiles the CUDA kernels, and says where .venv has the tools.
# cargo and rustdoc can't use make's job server, so this unsets MAKEFLAGS.
KERNEL_TOOLS = unset MAKEFLAGS MFLAGS && eval "$$($(PY) kernels/toolchain.py)" &&
# Tests, lint and the compiler of the CUDA kernels name the same packages and the same profile, so
# they share one build.
WORKSPACE := --profile checked --workspace --exclude burst-attention-peak
# A library in place of NVIDIA's, under the names that JAX's plugin looks for.
STANDIN := $(BUILD)/standin
STANDIN_NAMES := libcuda.so.1 libcudart.so.13 libnccl.so.2 libnvidia-ml.so.1 libcudnn.so.9 libcublasLt.so.13 \
    libnvrtc.so.13
KERNEL_IMAGES = $(KERNEL_TOOLS) cargo build --quiet $(WORKSPACE) --bin kernel-images && \
    $(BUILD)/checked/kernel-images $(or $(1),$(IMAGES)) $(BUILD)/kernel-images

# Removes the folders of the build machine from the library, whose messages name source files.
REMAP := --remap-path-prefix=$(CURDIR)=burst-attention \
    --remap-path-prefix=$(if $(CARGO_HOME),$(CARGO_HOME),$(HOME)/.cargo)/registry/src=crates

# PYTHON only makes .venv. The build scripts of crates would prefer it to the Python of .venv.
unexport PYTHON
# Python compiles what it imports, once, and pip need not compile all that it installs. Where the
# environment forbids Python to keep that, each process compiles JAX again: 4 s.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX := $(abspath $(BUILD))/pycache
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export CARGO_TERM_PROGRESS_WHEN := never
SAY = @printf '\n\033[1m== %s\033[0m\n'
# One pip at a time changes .venv.
PIP_INSTALL = @flock $(VENV) $(PY) -m pip install --quiet --no-compile

.PHONY: $(shell sed -nE 's/^([a-z-]+):.*/\1/p' Makefile)

help:  ## print this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' Makefile | expand -t 26

# pip and cargo run in parallel: the packages and the library do not need each other.
build: $(VENV)/headers  ## make .venv, compile and install all that CPU devices need
	@$(MAKE) --silent $(if $(filter -j%,$(MAKEFLAGS)),,-j2) $(BUILT)

images: $(BUILD)/images-complete  ## compile the CUDA kernels' images for all GPU targets

demo: build  ## train a transformer over 8 devices; ATTENTION=linear, delta or infini; flags in DEMO="--steps 9"
	$(SAY) "demo: training over 8 CPU devices"
	@$(PY) examples/train_long_context.py $(if $(ATTENTION),--attention $(ATTENTION)) $(DEMO)

demo-generate: build  ## generate text with a cache sharded over 8 devices, or POOL=4 others than the model's 4; trains first if needed
	@test -e out/checkpoint.npz || $(MAKE) demo
	$(SAY) "demo: generating with a cache over $(or $(POOL),8) CPU devices"
	@$(PY) examples/generate.py $(if $(POOL),--devices 4 --pool $(POOL)) $(GENERATE)

demo-windows: build  ## train window and global layers on packed documents; flags in WINDOWS="..."
	$(SAY) "demo: packed documents over 2 x 4 CPU devices"
	@$(PY) examples/packed_windows.py $(WINDOWS)

# Python tests run in parts (tests/python/long.py). The commit chooses the part of `make test` and
# of `make test-full`, so every part runs as changes go in. A target by itself runs all cases.
SAMPLE :=
PART = $(if $(SAMPLE),--sample=$(SAMPLE))
PASSED = part $(subst /, of ,$(SAMPLE)) passed; SAMPLE=$(SAMPLE) repeats it, SAMPLE=1/1 runs all parts

# cargo begins as soon as it has its packages, and pip fetches those of the Python tests beside it.
# The Python tests come last and alone: beside other work, threads of 8 devices wait for each other
# (test_correct.py on 2 cores: 11 s alone, 119 s at a load of 8).
test: SAMPLE = $(shell .ci/part 2)
test:  ## run a check of every kind, with one half of the Python tests' cases; SAMPLE=2/2 chooses
	@$(MAKE) --silent -j2 --output-sync=target test-rust $(VENV)/dev $(STANDIN)/ready
	@$(MAKE) --silent test-python test-standin SAMPLE=$(SAMPLE)
	$(SAY) "make test: $(PASSED)"

# One kind after the other, because each uses both cores; the two that use one core run side by side.
LONG := test-rust-full test-python-full test-compiled test-wheel test-standin-full test-standin-cudnn
test-full: SAMPLE = $(shell .ci/part 4)
test-full: lint docs $(LONG)  ## run lint, docs and one quarter of the long tests; SAMPLE=3/4 chooses
	@$(MAKE) --silent -j2 --output-sync=target test-trainers-short test-cudnn
	$(SAY) "make test-full: $(PASSED)"

test-all:  ## run every part of all tests but test-images and the whole products (about 3 h)
	@$(MAKE) --silent test SAMPLE=1/1
	@$(MAKE) --silent lint docs $(LONG) test-rare test-cudnn test-trainers SAMPLE=1/1
	$(SAY) "make test-all: all parts passed"

test-exhaustive: checked-package baselines $(STANDIN)/ready test-images test-trainers  ## test the whole products of the cases (days)
	@$(PY) -m pytest --checked -m "" --exhaustive $(PYTEST)
	@$(PY) -m pytest -m "" --platform=standin $(PYTEST)

test-rust: $(VENV)/kernels
	$(SAY) "Rust: core, CUDA executor, XLA custom calls, CUDA kernels on an interpreter"
	@$(KERNEL_TOOLS) cargo test --quiet $(WORKSPACE)

test-rust-full: $(VENV)/kernels
	$(SAY) "Rust: long cases"
	@$(KERNEL_TOOLS) cargo test --quiet $(WORKSPACE) -- --ignored --skip real_cudnn $(IMAGE_TESTS:%=--skip %)

# To compile the images of all targets takes 35 minutes of a processor, too long for test-full.
IMAGE_TESTS := images_of_all_targets quality_of_all_targets every_case_of_hopper every_tile_of_other_targets
test-images: $(BUILT) $(VENV)/dev wheel  ## test the wheel's images, after a change of a CUDA kernel
	$(SAY) "Rust and Python: images of all targets"
	@$(KERNEL_TOOLS) cargo test --quiet $(WORKSPACE) -- --ignored $(IMAGE_TESTS)
	@$(PY) -m pytest -m images $(PYTEST)

kernel-quality: images  ## print what the compiler made of each CUDA kernel; WRITE=1 accepts it
	@$(KERNEL_TOOLS) cargo build --quiet $(WORKSPACE) --bin kernel-quality && \
	    $(BUILD)/checked/kernel-quality $(IMAGES) $(if $(WRITE),--write)

# cuDNN and what it loads come from PyPI. A driver that does nothing takes the place of NVIDIA's.
# The filter chooses the tests, because with `--test cudnn` cargo would compile the core once more.
CUDNN_VERSION :=
CUDNN_VERSIONS := $(or $(CUDNN_VERSION),$(shell \
    sed -n 's/^nvidia-cudnn-cu13==//p' requirements/cudnn-oldest.txt requirements/cudnn-newest.txt))
CUDNN_NEEDS := $(VENV)/cudnn-needs
CUDNN_PATH = $(CURDIR)/$(CUDNN_NEEDS)/driver:$(CURDIR)/$(CUDNN_NEEDS)/nvidia/cu13/lib
test-cudnn: $(CUDNN_VERSIONS:%=$(VENV)/cudnn-%/ready)  ## test plans of the oldest and the newest cuDNN, or of CUDNN_VERSION=9.25.1.1, without a GPU
	@for version in $(CUDNN_VERSIONS); do \
	    printf '\n\033[1m== %s\033[0m\n' "Rust: plans of cuDNN $$version on three kinds of GPUs that are not here"; \
	    ( $(KERNEL_TOOLS) LD_LIBRARY_PATH=$(CUDNN_PATH):$(CURDIR)/$(VENV)/cudnn-$$version/nvidia/cudnn/lib \
	        cargo test --quiet $(WORKSPACE) -- --ignored real_cudnn ); done

test-python: checked-package baselines  ## run the Python tests; PYTEST=... adds arguments
	$(SAY) "Python: pytest, on 8 CPU devices (PYTEST=... adds arguments; -n0 for one process)"
	@$(PY) -m pytest --checked -n 2 --dist worksteal $(PART) $(PYTEST)

test-python-full: checked-package
	$(SAY) "Python: the long tests"
	@$(PY) -m pytest --checked -m 'long and not rare' -n 2 --dist worksteal $(PART) $(PYTEST)

test-rare: checked-package
	$(SAY) "Python: the rare tests"
	@$(PY) -m pytest --checked -m rare -n 2 --dist worksteal $(PYTEST)

test-compiled: checked-package $(VENV)/cuda/ready  ## compile training steps for GPUs that are not here
	$(SAY) "Python: training steps through XLA's compiler for GPUs that are not here"
	@$(PY) -m pytest --checked -n 2 --dist worksteal tests/python/compiled $(PYTEST)

STANDIN_PYTEST = $(PY) -m pytest --platform=standin -n 2
test-standin: standin-package  ## run some Python tests on GPUs that are not here
	$(SAY) "Python: pytest on GPUs that are not there, over a driver of our own"
	@$(STANDIN_PYTEST) --dist worksteal --marked=standin $(PART) $(PYTEST)

test-standin-full: standin-package  ## run the other Python tests on GPUs that are not here
	$(SAY) "Python: the suite on GPUs that are not there"
	@$(STANDIN_PYTEST) --dist worksteal -m 'not (standin or long or rare or images)' $(PART) $(PYTEST)

# The same tests of softmax attention, in which cuDNN computes the tiles that it serves. Their heads
# then have 64 columns or more (tests/python/platforms.py). test_cudnn.py has errors of long rings.
test-standin-cudnn: standin-package  ## run tests of softmax attention by cuDNN on GPUs that are not here
	$(SAY) "Python: softmax attention by cuDNN on GPUs that are not there"
	@BURST_ATTENTION_KERNELS=cudnn $(STANDIN_PYTEST) --dist load --marked=cudnn \
	    -k "not does_not_grow" $(PART) $(PYTEST)

test-trainers: build $(TRAINERS)/ready  ## train with MaxText, Tunix and Levanter, this attention against theirs (12 min)
	$(SAY) "Python: trainers that others wrote, with this attention and with their own"
	@PYTHONPATH=jax_plugin $(TRAINERS)/bin/python -m pytest -c tests/trainers/pytest.ini \
	    --rootdir tests/trainers tests/trainers $(PYTEST)

test-trainers-short: PYTEST = -m short
test-trainers-short: test-trainers

# A broken link is an error. A link to a private item is none, because private items get pages here.
DOC_LINKS := -D rustdoc::broken_intra_doc_links -A rustdoc::private_intra_doc_links
lint: $(VENV)/dev  ## check with rustfmt, clippy, rustdoc, ruff and mypy
	$(SAY) "lint: rustfmt, clippy, rustdoc, ruff, mypy"
	@cargo fmt --all --check
	@$(KERNEL_TOOLS) cargo clippy --quiet $(WORKSPACE) --all-targets -- -D warnings
	@cargo clippy --quiet --release -p burst-attention-peak --all-targets -- -D warnings
	@$(KERNEL_TOOLS) RUSTDOCFLAGS="$(DOC_LINKS)" \
	    cargo doc --quiet $(WORKSPACE) --no-deps --document-private-items
	@$(VENV)/bin/ruff check --quiet
	@$(VENV)/bin/ruff format --check --quiet || { $(VENV)/bin/ruff format --diff --quiet; exit 1; }
	@$(VENV)/bin/mypy

docs: build $(VENV)/docs  ## build the documents as a site, target/docs/index.html
	$(SAY) "documents: pictures, pages, API reference"
	@$(PY) docs/pictures.py target/pictures
	@$(PY) -m sphinx --quiet --fail-on-warning --keep-going --fresh-env \
	    --doctree-dir target/doctrees docs target/docs

format: $(VENV)/dev  ## format files with rustfmt and ruff
	@cargo fmt --all
	@$(VENV)/bin/ruff check --fix --quiet
	@$(VENV)/bin/ruff format

# Zig has the symbols of each glibc, for both kinds of hosts. So a wheel runs on systems that are older
# than the one that builds it. `rustup target add` installs Rust's standard library for another host.
GLIBC := 2.28
WHEEL_PACKAGE := $(BUILD)/wheel-package
WHEEL_TARGET = $(or $(HOST),$(shell uname -m))-unknown-linux-gnu
ZIG_CACHE := $(abspath $(BUILD))/zig
ZIG_BUILD = CARGO_ZIGBUILD_PYTHON_PATH=$(CURDIR)/$(PY) CARGO_ZIGBUILD_CACHE_DIR=$(ZIG_CACHE) \
    ZIG_GLOBAL_CACHE_DIR=$(ZIG_CACHE) RUSTFLAGS="$(REMAP) $${RUSTFLAGS-}" $(VENV)/bin/cargo-zigbuild zigbuild
wheel: $(VENV)/dev $(VENV)/zig $(if $(HOST)$(TARGETS),,images)  ## make dist/*.whl, for this host or HOST=aarch64, for all GPUs or TARGETS="sm_90 sm_100"
	$(SAY) "Rust library for $(WHEEL_TARGET) with glibc $(GLIBC)"
	@$(call COPY_SOURCES,$(WHEEL_PACKAGE))
	@$(ZIG_BUILD) --quiet --release -p burst-attention-ffi --target $(WHEEL_TARGET).$(GLIBC)
	@cp $(BUILD)/$(WHEEL_TARGET)/release/$(notdir $(LIBRARY)) $(WHEEL_PACKAGE)/burst_attention
	$(SAY) "CUDA kernels for $(or $(TARGETS),all targets)"
	@$(if $(HOST)$(TARGETS),$(call KERNEL_IMAGES,$(WHEEL_PACKAGE)/burst_attention/images) \
	    $(if $(HOST),--host $(HOST)) $(TARGETS),cp -r $(IMAGES) $(WHEEL_PACKAGE)/burst_attention)
	$(SAY) "wheel"
	@rm -rf dist
	@$(PY) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist $(WHEEL_PACKAGE)
	@$(PY) .ci/check_wheel.py dist/*.whl $(GLIBC)

gpu-bundle: $(VENV)/dev  ## make dist/gpu-TARGET.tar.gz for ten minutes on a GPU machine; TARGET=sm_90 NCCL=libnccl.so.2
	@test -n "$(TARGET)" || { echo 'expected a kind of GPU, such as TARGET=sm_90'; exit 1; }
	@test -z "$(NCCL)" || $(PY) tests/python/nccl_library.py "$(NCCL)"
	@$(MAKE) --silent wheel TARGETS=$(TARGET)
	$(SAY) "bundle for $(TARGET)"
	@.ci/gpu-bundle $(PY) $(TARGET) dist/burst_attention-*.whl $(if $(NCCL),"$(NCCL)")

# This wheel has the images that the stand-in knows, because to compile the real ones takes long.
test-wheel: $(BUILT) $(VENV)/dev $(STANDIN)/ready baselines  ## install a wheel with the oldest and the newest JAX and Python, run tests
	$(SAY) "wheel for tests"
	@$(call COPY_SOURCES,$(TEST_PACKAGE))
	@cp -r $(LIBRARY) $(STANDIN)/package/burst_attention/images $(TEST_PACKAGE)/burst_attention
	@$(PY) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir $(TEST_PACKAGE) \
	    $(TEST_PACKAGE)
	@$(PY) .ci/check_wheel.py $(TEST_PACKAGE)/*.whl
	@for which in oldest newest newest-python; do \
	    .ci/test-wheel $(PY) $$which $(TEST_PACKAGE)/*.whl $(PART) $(PYTEST); done

bench: build  ## measure speed and memory; PYTHON_BENCH=... is a Python with torch
	$(SAY) "benchmarks (BENCH=--quick measures briefly)"
	@cargo build --quiet --release -p burst-attention-peak
	@PYTHONPATH=jax_plugin $(PYTHON_BENCH) benchmarks/run.py \
	    --peak $(BUILD)/release/burst-attention-peak $(BENCH)

schedule-bench: build  ## measure all schedules, and several processes, against one ring
	@PYTHONPATH=jax_plugin $(PYTHON_BENCH) benchmarks/schedules.py $(BENCH)

linear-bench: build  ## measure linear attention against plain JAX
	@PYTHONPATH=jax_plugin $(PYTHON_BENCH) benchmarks/linear.py $(BENCH)

masks-bench: build  ## measure masks as data against the calls that they replace
	@PYTHONPATH=jax_plugin $(PYTHON_BENCH) benchmarks/masks.py $(BENCH)

decode-bench: build  ## measure decoding against the roof, jax.nn and torch
	@cargo build --quiet --release -p burst-attention-peak
	@PYTHONPATH=jax_plugin $(PYTHON_BENCH) benchmarks/decode.py \
	    --peak $(BUILD)/release/burst-attention-peak $(BENCH)

offload-bench: build  ## measure caches on other devices, and draw two batches in turn
	@PYTHONPATH=jax_plugin $(PY) benchmarks/offload.py $(BENCH)

claims: build baselines  ## predict the claims of publications: docs/claims.md, studies/results/claims.json
	@PYTHONPATH=jax_plugin $(PY) studies/claims.py

model-bench: build  ## predict work and time of a real model's attention on 64 GPUs
	@PYTHONPATH=jax_plugin:examples $(PY) benchmarks/real_model.py

memory-bench: $(BUILT) $(VENV)/kernels $(VENV)/cuda/ready  ## read the memory of training steps from XLA's compiler for GPUs (1 h)
	@PYTHONPATH=jax_plugin:$(VENV)/cuda $(PY) benchmarks/memory.py $(BENCH)

# PYTHON_BENCH has torch and cuda-bindings.
kernel-bench: build images  ## measure the CUDA kernels on an NVIDIA GPU
	@$(PYTHON_BENCH) benchmarks/kernels.py --library $(LIBRARY) $(BENCH)

# PYTHON_BENCH has jax[cuda13], the wheel, and pytest, pytest-xdist, pytest-timeout, beartype and
# flatbuffers as requirements/dev.txt pins them.
gpu-check:  ## run all tests on NVIDIA GPUs, then measure rings
	$(SAY) "Python: the whole suite on this machine's GPUs"
	@$(PYTHON_BENCH) -m pytest --platform=cuda -n4 --dist=loadfile $(PYTEST)
	$(SAY) "rings on one GPU: time and memory"
	@$(PYTHON_BENCH) benchmarks/ring_gpu.py $(BENCH)

figures: build  ## write the figures that benchmarks/results/ has into the pages
	@PYTHONPATH=benchmarks $(PY) benchmarks/figures.py

host-cost: $(VENV)/headers  ## measure the host time that issuing a ring to a GPU takes
	@cargo run --quiet --release -p burst-attention-host-cost

clean:  ## remove everything that make has made, .venv too
	@rm -rf $(VENV) target dist out $(LIBRARY) $(IMAGES)

# Files: stamps of installed packages, the library, images.

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

$(VENV)/kernels: $(VENV)/headers requirements/kernels.txt
	$(SAY) "assembler of the CUDA kernels into $(VENV) (once, 650 MB)"
	$(PIP_INSTALL) -r requirements/kernels.txt
	@touch $@

$(VENV)/dev: $(VENV)/ready $(VENV)/kernels requirements/dev.txt
	$(SAY) "Python packages of the tests into $(VENV)"
	$(PIP_INSTALL) -r requirements/dev.txt
	@touch $@

$(VENV)/zig: $(VENV)/headers requirements/wheel.txt
	$(SAY) "zig, which links the wheel's library, into $(VENV) (once, 100 MB)"
	$(PIP_INSTALL) -r requirements/wheel.txt
	@touch $@

# The pins of the trainers exclude each other, so the file names every package.
$(TRAINERS)/ready: requirements/trainers.txt $(VENV)/headers
	$(SAY) "trainers into $(TRAINERS) (once, 1.9 GB)"
	@.ci/make-venv $(TRAINERS) $(CURDIR)/$(VENV)/bin/python
	@$(TRAINERS)/bin/python -m pip install --quiet --no-compile --no-deps -r requirements/trainers.txt
	@touch $@

# Outside of site-packages, because JAX would find the plugin there in every program.
$(VENV)/cuda/ready: requirements/cuda.txt $(VENV)/headers
	$(SAY) "JAX's CUDA plugin into $(VENV)/cuda (once, 145 MB)"
	@rm -rf $(@D)
	$(PIP_INSTALL) --no-deps --target $(@D) -r requirements/cuda.txt
	@touch $@

$(CUDNN_NEEDS)/ready: requirements/cudnn.txt tests/cudnn_driver.c $(VENV)/kernels
	$(SAY) "what cuDNN loads into $(CUDNN_NEEDS) (once, 760 MB)"
	@rm -rf $(@D)
	$(PIP_INSTALL) --no-deps --target $(@D) -r requirements/cudnn.txt
	@mkdir $(@D)/driver
	@$${CC:-cc} -shared -fPIC -Wl,-soname,libcuda.so.1 -o $(@D)/driver/libcuda.so.1 tests/cudnn_driver.c
	@touch $@

$(VENV)/cudnn-%/ready: $(CUDNN_NEEDS)/ready
	$(SAY) "cuDNN $* into $(@D) (once, 850 MB)"
	@rm -rf $(@D)
	$(PIP_INSTALL) --no-deps --target $(@D) nvidia-cudnn-cu13==$*
	@touch $@

# The stand-in for GPUs: the library under NVIDIA's names, the compiler's files as XLA looks for
# them, and the package with images that the stand-in knows.
$(STANDIN)/ready: $(RUST) $(KERNELS) \
    $(shell find tests/standin tests/ptx kernels/interpreter/src -type f) \
    $(CHECKED_LIBRARY) $(VENV)/cuda/ready
	$(SAY) "stand-in for GPUs"
	@$(KERNEL_TOOLS) cargo build --quiet $(WORKSPACE) --lib --bin standin-images
	@rm -rf $(STANDIN) && mkdir -p $(STANDIN)/lib $(STANDIN)/cuda/bin $(STANDIN)/cuda/nvvm \
	    $(STANDIN)/package/burst_attention/images
	@cp $(BUILD)/checked/libstandin.so $(STANDIN)/lib
	@for name in $(STANDIN_NAMES); do \
	    $${CC:-cc} -shared -o $(STANDIN)/lib/$$name -Wl,-soname,$$name -Wl,--no-as-needed \
	        -L$(STANDIN)/lib -lstandin -Wl,-rpath,'$$ORIGIN'; done
	@ln -s $(CURDIR)/tests/standin/ptxas $(STANDIN)/cuda/bin/ptxas
	@ln -s $$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia/cu13/nvvm/libdevice \
	    $(STANDIN)/cuda/nvvm/libdevice
	@cp $(CHECKED_LIBRARY) $(STANDIN)/package/burst_attention
	@for target in sm_90 sm_100; do \
	    $(BUILD)/checked/standin-images $(STANDIN)/package/burst_attention/images $$target; done
	@touch $@

$(VENV)/docs: $(VENV)/ready requirements/docs.txt
	$(SAY) "Python packages of the documents into $(VENV)"
	$(PIP_INSTALL) -r requirements/docs.txt
	@touch $@

$(LIBRARY): $(RUST) $(VENV)/headers
	$(SAY) "Rust library"
	@RUSTFLAGS="$(REMAP) $${RUSTFLAGS-}" cargo build --quiet --release -p burst-attention-ffi
	@cp $(BUILD)/release/$(@F) $@.new && mv $@.new $@

$(CHECKED_LIBRARY): $(RUST) $(VENV)/kernels
	$(SAY) "Rust library for tests"
	@$(KERNEL_TOOLS) cargo build --quiet $(WORKSPACE) --lib
	@mkdir -p $(@D)
	@cp $(BUILD)/checked/$(@F) $@.new && mv $@.new $@

# The program with which the studies predict baselines. With --lib its dependencies are those of the
# tests, which are compiled already.
baselines: $(VENV)/kernels
	@$(KERNEL_TOOLS) cargo build --quiet $(WORKSPACE) --lib --bin burst-attention-baselines

checked-package: $(CHECKED_LIBRARY) $(VENV)/dev
	@$(call LINK_SOURCES,$(CHECKED_PACKAGE))

standin-package: $(STANDIN)/ready $(VENV)/dev
	@$(call LINK_SOURCES,$(STANDIN)/package/burst_attention)

$(VENV)/installed: jax_plugin/pyproject.toml $(PACKAGE)/_version.py $(VENV)/ready
	$(PIP_INSTALL) --no-deps --no-build-isolation --editable jax_plugin
	@touch $@

$(BUILD)/images-complete: $(KERNELS) $(VENV)/kernels
	$(SAY) "CUDA kernels for all targets"
	@$(KERNEL_IMAGES)
	@touch $@
