# make demo: FedSelect beside the methods it is compared with, on real data, in about two minutes
# make test: everything that needs no GPU
# make test-all: the same with all products of cases, and ten times as many random ones
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-all check lock clean

demo: .venv/.installed
	$(BIN)/fedselect demo --overwrite

test: .venv/.test
	$(BIN)/python -m pytest -n auto

test-all: .venv/.test
	$(BIN)/python -m pytest -n auto -m "" --hypothesis-profile full

check: .venv/.test
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

.venv/.installed: requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

.venv/.test: .venv/.installed requirements-test.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-test.lock
	@touch $@

lock: .venv/.test
	$(BIN)/python scripts/lock.py

clean:
	rm -rf .venv build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
