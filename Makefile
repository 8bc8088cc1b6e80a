# Two commands on a fresh machine with Python 3.11+, pip and git: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
# Tests run in so many processes, each file in one of them.
JOBS ?= 2
BIN := $(VENV)/bin

.PHONY: demo test lint types imports unit bench tables clean

demo: $(VENV)/.demo
	$(BIN)/sidestream demo

test: lint types imports unit

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.dev
	$(BIN)/mypy

imports: $(VENV)/.dev
	$(BIN)/lint-imports

unit: $(VENV)/.dev
	$(BIN)/sidestream models prepare smollm2-135m-instruct || echo "no demo model: its tests will be skipped"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile

# Every benchmark of this machine; results are committed.
bench: $(VENV)/.dev
	for name in prefix decode overhead soak; do \
		$(BIN)/sidestream bench $$name --json > bench/results/$$name-cpu.json.new; \
		mv bench/results/$$name-cpu.json.new bench/results/$$name-cpu.json; \
	done
	$(BIN)/sidestream torture --json > bench/results/torture-cpu.json.new
	mv bench/results/torture-cpu.json.new bench/results/torture-cpu.json
	$(BIN)/sidestream torture --mutations --json > bench/results/torture-mutations.json.new
	mv bench/results/torture-mutations.json.new bench/results/torture-mutations.json
	$(MAKE) tables

# Tables and pictures in README and docs are generated from bench/results.
tables: $(VENV)/.dev
	$(BIN)/python bench/tables.py

clean:
	rm -rf $(VENV) runs

$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Sidestream needs Python 3.11 or later; '$(PYTHON)' is $$($(PYTHON) --version 2>&1): make PYTHON=python3.12 …"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(VENV)/bin/pip pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[server,demo]'
	touch $@

$(VENV)/.dev: $(VENV)/bin/pip pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@
