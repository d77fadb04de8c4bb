# make demo: FedSelect beside the methods it is compared with, on real data, in about two minutes
# make install: the package and what it needs, into .venv
# make test: everything that needs no GPU; GPU kernels run in Python
# make docs: the documentation site, in build/site
# make test-all: the same with all products of cases, and ten times as many random ones
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo install test test-all check docs lock clean

demo: .venv/.installed
	$(BIN)/fedselect demo --overwrite

install: .venv/.installed

test: .venv/.test
	$(BIN)/python -m pytest -n auto
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n auto -r f tests/kernels

test-all: .venv/.test
	$(BIN)/python -m pytest -n auto -m "" --hypothesis-profile full

check: .venv/.test
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

.venv/.installed: requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

.venv/.test: .venv/.installed requirements-test.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-test.lock
	@touch $@

.venv/.docs: .venv/.installed requirements-docs.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-docs.lock
	@touch $@

lock: .venv/.test .venv/.docs
	$(BIN)/python scripts/lock.py

clean:
	rm -rf .venv build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
