# `make demo` and `make test` set everything up themselves; all paths are relative, so the clone may lie anywhere.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready

.PHONY: demo test test-slow lint format complexity clean

demo: $(READY)
	$(RUN) -m nestfed demo

test: $(READY)
	$(RUN) -m pytest -n 2 -m "not slow"

test-slow: $(READY)
	$(RUN) -m pytest -m slow

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: $(READY)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

# The theorems' rates, measured (about ten minutes of one core).
complexity: $(READY)
	$(RUN) benchmarks/complexity/measure.py

$(READY): pyproject.toml constraints.txt
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(READY)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
