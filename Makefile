# SPDX-License-Identifier: MIT

SHELL := /bin/bash -o pipefail
PYTHON ?= $(shell .ci/find-python)
VENV ?= .venv
PIP := $(VENV)/bin/pip --disable-pip-version-check
RUN := $(VENV)/bin/python
SOURCES := $(wildcard cuda/*.* cuda/host/*.h cuda/host/*.cpp pyx/*.*) setup.py build_cuda.py
TESTS ?=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-device test-mpi examples gpu-check soak style format bench bench-peers peers build wheel \
    sanitize avx512-emulated clean

help:  ## say what there is
	@grep -hE '^[a-z0-9-]+:.*##' Makefile | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

demo: $(VENV)/.built  ## set everything up and write text with the model that ships
	$(VENV)/bin/k3session generate --max-tokens 120 --seed 1 ROMEO:

test: $(VENV)/.test  ## set everything up and run the tests; TESTS="-k resume" runs some
	$(RUN) -m pytest $(TESTS)

# What runs on a GPU as well: single ops, and whole models.
DEVICE_TESTS := tests/test_ops_linear.py tests/test_ops_kda.py tests/test_ops_mla.py tests/test_ops_moe.py tests/test_ops_rows.py \
    tests/test_properties.py tests/test_cuda_model.py tests/test_cuda_faults.py tests/test_gpu_streaming.py

test-device: $(VENV)/.test  ## run the GPU's kernels and models on the emulator; DEVICE=gpu on a real one
	K3_TEST_DEVICE=$(or $(DEVICE),emulator) $(RUN) -m pytest $(DEVICE_TESTS) $(TESTS)
	K3_TEST_DEVICE=$(or $(DEVICE),emulator) $(RUN) -m pytest tests/test_stage.py -k "smallest or aborted or handed_over" $(TESTS)
	$(if $(filter gpu,$(DEVICE)),,K3_TEST_DEVICE=emulator-check $(RUN) -m pytest tests/test_cuda_check.py $(TESTS))
	$(if $(filter gpu,$(DEVICE)),,K3_TEST_DEVICE=emulator-check $(RUN) -m pytest tests/test_gpu_streaming.py \
	    -k "schedule or (micro and $(if $(K3_SOAK),(nothing or half or part),half))" $(TESTS))

test-mpi: $(VENV)/.mpi  ## run pipelines of 1 to 4 processes over MPI, and tests of sessions over stages
	K3_TEST_MPI=require $(RUN) -m pytest tests/test_pipeline.py $(TESTS)
	K3_TEST_STAGES=2,5 $(RUN) -m pytest tests/test_fork.py tests/test_rewind.py tests/test_snapshot.py tests/test_background_save.py

examples: $(VENV)/.mpi  ## run all examples, those with Ray too where it can be installed
	@$(PIP) install --quiet 'ray>=2.40' || echo "Ray cannot be installed here: its example says so and ends"
	$(RUN) -m pytest tests/test_examples.py $(TESTS)

gpu-check: $(VENV)/.test  ## check and time the kernels on this machine's GPU; writes benches/results/gpu.json
	$(RUN) cuda/emulator/build.py
	$(RUN) benches/gpu_check.py

soak: $(VENV)/.mpi  ## run the tests with full counts (hours); writes tests/soak.txt
	@mkdir -p build
	K3_SOAK=1 $(RUN) -m pytest -m "" --durations=20 | tee build/soak.txt
	K3_SOAK=1 $(MAKE) --no-print-directory test-device TESTS='-m ""' | tee -a build/soak.txt
	{ date -u +%Y-%m-%d; $(RUN) -c 'import platform; print(platform.machine(), "Python", platform.python_version())'; \
	  cat build/soak.txt; } | sed 's,$(CURDIR)/,,g' > tests/soak.txt

style: $(VENV)/.dev  ## run all style checks
	.ci/style $(VENV)/bin

format: $(VENV)/.dev  ## rewrite the code as the style checks want it
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i pyx/*.h cuda/*.h cuda/*.cuh cuda/*.cu cuda/*.cpp cuda/host/*.h cuda/host/*.cpp \
	    cuda/emulator/*.h cuda/emulator/*.cpp tests/cpp/*.h tests/cpp/*.cpp tests/emulator/*.cu

bench: $(VENV)/.test  ## run the benchmarks; writes benches/results/bench.csv, and fails on what became slower
	@mkdir -p build benches/results
	$(RUN) -m pytest benches/bench_*.py --benchmark-only --benchmark-storage=file://.benchmarks --benchmark-autosave \
	    --benchmark-json=build/bench.json $$($(RUN) benches/history.py before) $(TESTS)
	$(RUN) benches/to_csv.py build/bench.json benches/results/bench.csv
	$(RUN) benches/history.py check

bench-peers: $(VENV)/.test  ## measure k3session beside the runtimes that `make peers` installs; OPTIONS=--quick
	$(RUN) benches/peers $(OPTIONS)

# llama.cpp is compiled for this processor, which takes long; what cannot be installed is left out of the comparison.  Its own
# use of Intel's matrix unit ends the process with this model in Q8_0, so it is compiled without.
NO_AMX := $(if $(shell grep -m1 -o amx_int8 /proc/cpuinfo),-mno-amx-tile -mno-amx-int8 -mno-amx-bf16)
peers: $(VENV)/.test  ## install the runtimes that bench-peers compares with, as far as that is possible here
	-CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF '-DCMAKE_C_FLAGS=$(NO_AMX)' '-DCMAKE_CXX_FLAGS=$(NO_AMX)'" $(PIP) install llama-cpp-python==0.3.36 --no-binary llama-cpp-python
	-$(PIP) install gguf matplotlib
	-$(PIP) install 'mlx[cpu]' mlx-lm

build: $(VENV)/.built  ## compile what has changed

wheel: $(VENV)/.dev  ## build the sdist, and from it the wheel, into dist/
	rm -rf dist
	@mkdir -p build
	$(RUN) -m build --outdir dist . > build/wheel.log 2>&1 || { cat build/wheel.log; exit 1; }
	$(RUN) .ci/check_dist.py dist

sanitize: $(VENV)/.test  ## run kernel and session tests under ASan, UBSan and TSan; CI=true runs fewer
	$(call requirements,build) | $(PIP) install --quiet --requirement /dev/stdin
	.ci/sanitize $(RUN)

avx512-emulated:  ## compare the AVX-512 ops with the AVX2 ops, bit for bit, on any processor; needs libsimde-dev
	$(MAKE) --no-print-directory -C tests/cpp avx512-emulated

clean:  ## remove what was built, the virtual environment included
	rm -rf build dist $(VENV) *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .benchmarks
	rm -rf k3session/_cuda k3session/_core/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---------------------------------------------------------------------------------------------
# What is installed is remembered in files of the virtual environment.
# ---------------------------------------------------------------------------------------------

# The requirements of one extra, or of the build, one a line.
requirements = $(RUN) .ci/requirements.py $(1)

$(VENV)/bin/python:
	@test -n "$(PYTHON)"
	$(PYTHON) -m venv $(VENV)

# First as a user would install it; afterwards only what has changed is compiled.
$(VENV)/.built: $(SOURCES) pyproject.toml | $(VENV)/bin/python
	if [ pyproject.toml -nt $(VENV)/.installed ]; then \
	    $(PIP) install --editable '.[text]' && touch $(VENV)/.installed; \
	else \
	    $(call requirements,build) | $(PIP) install --quiet --requirement /dev/stdin && \
	    $(RUN) setup.py --quiet build_ext --inplace; \
	fi
	@touch $@

$(VENV)/.test: $(VENV)/.built
	$(call requirements,test) | $(PIP) install --quiet --requirement /dev/stdin
	@touch $@

$(VENV)/.mpi: $(VENV)/.test
	$(call requirements,test-mpi) | $(PIP) install --quiet --requirement /dev/stdin
	@touch $@

$(VENV)/.dev: $(VENV)/.test
	$(call requirements,dev) | $(PIP) install --quiet --requirement /dev/stdin
	@touch $@
