# Every target works alone on a fresh machine with Python 3.11+, make and git; what is missing is installed into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PROTO := protos/consilium/v1/federation.proto
PACKAGES := consilium coordinator fl_core privacy protos service_core silo

# Demo and tests start dozens of processes; without files of compiled code each would compile all of the project anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test test-integration test-all test-ray check bench protos lock release docs clean
help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' Makefile | sed 's/:.*## /\t/'

setup: $(STAMP)  ## Install everything into .venv

# The stamp is older than the lock whenever the lock changed: then the environment is brought in line with it.
$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Consilium needs Python 3.11 or newer: make PYTHON=python3.12 setup"; exit 2; }
	@echo "Installs 226 packages into $(VENV): the first time 3.1 GB are downloaded (2.2 GB of it CUDA), 6.2 GB on the disk."
	@$(PYTHON) -m uv --version >/dev/null 2>&1 || { echo "Installs uv, which installs the rest."; $(PYTHON) -m pip install --quiet uv; } || { \
	  $(PYTHON) -m venv $(VENV)/.uv && $(VENV)/.uv/bin/pip install --quiet uv; }
	@UV="$(PYTHON) -m uv"; $$UV --version >/dev/null 2>&1 || UV=$(VENV)/.uv/bin/uv; \
	test -x $(BIN)/python || $$UV venv --quiet --allow-existing --python "$$($(PYTHON) -c 'import sys; print(sys.executable)')" $(VENV); \
	test -t 2 || QUIET=--quiet; \
	$$UV pip sync $$QUIET --compile-bytecode --python $(BIN)/python --require-hashes requirements.lock && \
	$$UV pip install --quiet --python $(BIN)/python --no-deps --editable .
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip >/dev/null 2>&1 || \
	  echo "this Python has no pip of its own: install extras with uv (uv pip install --python $(BIN)/python ...)"
	@echo "Compiles Consilium."
	@$(BIN)/python -m compileall -q $(PACKAGES)
	@touch $(STAMP)
	@echo "Ready. See a federation: make demo. Use the commands: export PATH=\"\$$PWD/$(BIN):\$$PATH\""

demo: setup  ## One federation on this machine: coordinator, six hospitals, mutual TLS; FedAvg, FedGELA, closed form, closed form at epsilon 8
	@$(BIN)/coordinator demo --out runs/demo

test: setup  ## Fast tests, three minutes on 2 cores
	@$(BIN)/python -m pytest -q -n 3 --dist worksteal -m "not integration and not slow"

test-integration: setup  ## Integration tests: whole services, processes and runs; fifteen minutes on 2 cores
	@$(BIN)/python -m pytest -q -n 3 --dist worksteal -m "integration and not slow"

test-all: setup  ## All tests, with the slow ones
	@$(BIN)/python -m pytest -q -n 2 --dist worksteal

test-ray: setup  ## The tests of simulation on Ray; adds the extra to .venv
	@UV="$(PYTHON) -m uv"; $$UV --version >/dev/null 2>&1 || UV=$(VENV)/.uv/bin/uv; \
	$$UV pip install --quiet --python $(BIN)/python --require-hashes -r requirements-ray.lock
	@$(BIN)/python -m pytest -q tests/consilium/research/engines/test_ray.py

check: setup  ## Style, types, layers, generated code, configuration, links of the documentation
	@$(BIN)/ruff check --quiet . && $(BIN)/ruff format --quiet --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/python -m tests.regenerate --check
	@$(BIN)/python -m tests.faults --check
	@$(BIN)/python -m pytest -q -n 2 --dist worksteal tests/test_configs.py tests/test_style.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir $(VENV)/site

docs: setup  ## The documentation as a site of files, in site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir site
	@echo site/index.html

bench: setup  ## The benchmarks, with their numbers
	@$(BIN)/python -m benchmarks.round_trip --silos 3 --params 11183582 --json
	@$(BIN)/python -m benchmarks.steps --json
	@$(BIN)/python -m benchmarks.simulate --json
	@$(BIN)/python -m benchmarks.simulate --epochs 1 --json
	@$(BIN)/python -m benchmarks.comparison digits_cnn --stored

protos: setup  ## Regenerate the protocol code and the page of errors
	@$(BIN)/python -m tests.regenerate

lock: setup  ## Resolve the dependencies anew
	@$(PYTHON) -m uv pip compile pyproject.toml --extra dev --python-version 3.11 --universal --generate-hashes \
	  --no-emit-index-url -c constraints.txt -o requirements.lock --quiet
	@$(PYTHON) -m uv pip compile pyproject.toml --extra dev --extra ray --python-version 3.11 --universal \
	  --generate-hashes --no-emit-index-url -c requirements.lock -o requirements-ray.lock --quiet
	@$(PYTHON) -m uv pip compile pyproject.toml --extra pages --extra torch --python-version 3.11 --universal \
	  --generate-hashes --no-emit-index-url -c requirements.lock -o requirements-silo.lock --quiet
	@$(PYTHON) -m uv pip compile pyproject.toml --extra pages --extra body --python-version 3.11 --universal \
	  --generate-hashes --no-emit-index-url -c requirements.lock -o requirements-without-torch.lock --quiet
	@$(PYTHON) -m uv pip compile pyproject.toml --extra pages --extra torch --python-version 3.11 --universal \
	  --generate-hashes --no-emit-index-url -c requirements.lock -o requirements-cpu.lock --quiet \
	  $$(grep -oE '^(nvidia|cuda|triton|torch)[a-z0-9-]*' requirements-silo.lock | sed 's/^/--no-emit-package /')

release: setup  ## Wheel, locks, bill of materials (CycloneDX) and checksums of the commit, in dist/: the same bytes for everybody
	@$(BIN)/python -m release dist

clean:  ## Remove what make made
	rm -rf $(VENV) runs build dist *.egg-info
