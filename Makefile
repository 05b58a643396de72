# Two commands set up everything: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: env demo test lint types pytest bench

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

# What is timed, beside its peers, which are kept out of the environment; DATA=FOLDER adds what needs images and a GPU.
PEERS := torchattacks foolbox eagerpy GitPython gitdb smmap requests urllib3 idna charset-normalizer certifi pytorch-ood \
	pandas python-dateutil tqdm

bench: env .bench/ready
	PYTHONPATH=.bench OMP_NUM_THREADS=1 $(BIN)/python benchmarks/bench.py runs/bench $(if $(DATA),--data $(DATA)) $(BENCH)

.bench/ready:
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .bench $(PEERS)
	touch $@
