# Two commands set up everything: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: env demo test lint types pytest

env: .venv/ready

# Made anew when the dependencies change.
.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

# A detector audited and broken, on embedded data; runs/demo/report.html shows it.
demo: env
	rm -rf runs/demo
	$(BIN)/gatecrash demo --out runs/demo

test: lint types pytest

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: env
	$(BIN)/mypy --strict src

pytest: env
	$(BIN)/python -m pytest --cov --cov-report=term
