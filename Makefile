# What a user and the CI run. Everything happens in .venv, which the first target that needs it makes:
#   make demo                                          plain
#   make PIP_ARGS="--extra-index-url ADDRESS" demo     with CPU wheels of torch, see README.md
PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
SGLANG := .venv-sglang
TASK := examples/arithmetic
# One thread a process: ranks and engine share the machine's cores, and threads of several processes only disturb them.
export OMP_NUM_THREADS := 1
TRAIN2 := $(BIN)/torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 2 pretrain_rl.py

.PHONY: install demo demo-short smoke-dp2 test install-sglang test-sglang check format bench bench-mask bench-step bench-layout bench-logprob clean

install: $(STAMP)

$(STAMP): pyproject.toml setup.py constraints.txt kernels/logprob_native.cpp kernels/logprob_native_rows.h
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_ARGS) -c constraints.txt -e ".[dev]"
	touch $@

# Each run starts afresh: only these directories of its own are removed.
demo: $(STAMP)
	rm -rf runs/demo
	$(TRAIN2) --config $(TASK)/demo.yaml --run-dir runs/demo
	$(BIN)/python tools/plot_run.py runs/demo
	$(BIN)/python tools/check_gain.py runs/demo --at-least 0.2 --samples 1024

demo-short: $(STAMP)
	rm -rf runs/demo-short
	$(TRAIN2) --config $(TASK)/demo.yaml --train-iters 120 --run-dir runs/demo-short
	$(BIN)/python tools/plot_run.py runs/demo-short
	$(BIN)/python tools/check_gain.py runs/demo-short --at-least 0.1 --samples 1024

# Data parallel: here the mask's all-reduces have something to reduce.
smoke-dp2: $(STAMP)
	rm -rf runs/smoke-dp2
	$(TRAIN2) --config $(TASK)/demo.yaml --tensor-model-parallel-size 1 --train-iters 20 --run-dir runs/smoke-dp2
	$(BIN)/python tools/plot_run.py runs/smoke-dp2
	$(BIN)/python tools/check_gain.py runs/smoke-dp2 --updates 20

test: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# A real SGLang server on the CPU, in an environment of its own beside .venv: its contract tests and a run of the main job.
install-sglang: $(SGLANG)/installed

$(SGLANG)/installed: tests/integration/sglang_cpu/install.sh tests/integration/sglang_cpu/requirements.txt
	PYTHON=$(PYTHON) tests/integration/sglang_cpu/install.sh $(SGLANG) $(PIP_ARGS)

test-sglang: $(STAMP) $(SGLANG)/installed
	$(BIN)/python -m pytest -k sglang --sglang-python $(SGLANG)/bin/python \
		tests/rollout/test_engine_contract.py tests/integration/test_sglang_run.py

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: bench-mask bench-step bench-layout bench-logprob

# Timings, no tests: what they print depends on the machine.
bench-mask: $(STAMP)
	$(BIN)/python tools/bench_mask.py

bench-logprob: $(STAMP)
	$(BIN)/python tools/bench_logprob.py --check

bench-step: $(STAMP)
	$(BIN)/python tools/bench_step.py --layout tp2
	$(BIN)/python tools/bench_step.py --layout dp2

bench-layout: $(STAMP)
	$(BIN)/python tools/bench_layout.py

clean:
	rm -rf $(VENV) $(SGLANG) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -rf runs/demo runs/demo-short runs/smoke-dp2
