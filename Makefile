# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo docs site package test tests quick fuzz lint types format bench clean

help: ## List what can be made
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 16

setup: $(READY) ## Create .venv with everything installed

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY) ## Compare six methods on very unequal digits, and plot the results
	@rm -rf demo && mkdir demo
	$(BIN)/fedloom partition partition.alpha=0.1 --out demo/partition.png
	$(BIN)/fedloom compare experiments/demo.toml --out demo/compare
	$(BIN)/fedloom report demo/compare --out demo/report.html >/dev/null
	@echo; echo "pictures: demo/partition.png (who has what) and demo/compare/curves.png (the results)"
	@echo "open demo/report.html in a browser: the same with curves to explore, every client, and all settings"

docs: $(READY) ## Write the pages of the documentation that are read off the classes
	$(BIN)/python docs/generate.py

site: $(READY) ## Build the documentation as a site, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

package: $(READY) ## Build sdist and wheel into dist/
	$(BIN)/python -m build --no-isolation

test: lint ## Lint, check types, and run every test
	@$(MAKE) --no-print-directory --jobs=2 types tests

# Three workers for two cores: many tests wait for other processes.
tests: $(READY)
	$(BIN)/python -m pytest -n 3 --dist worksteal

quick: $(READY) ## Run the tests of single functions, in less than a minute
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" $(addprefix --ignore=tests/,cli compare deploy golden runs)

N ?= 1000
fuzz: $(READY) ## Try N new cases of each kind of generated input, as in make fuzz N=5000
	FEDLOOM_FUZZ=$(N) $(BIN)/python -m pytest -n 0 tests/cli/test_fuzz.py

lint: $(READY) ## Check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY) ## Check types
	$(BIN)/mypy

format: $(READY) ## Rewrite files in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY) ## Measure speed, and write benchmarks/results
	$(BIN)/python -m benchmarks.executors
	$(BIN)/python -m benchmarks.ranks
	$(BIN)/python -m benchmarks.clients
	$(BIN)/python -m benchmarks.gossip
	$(BIN)/python -m benchmarks.draw

clean: ## Remove what the other targets made
	rm -rf $(VENV) demo dist runs site .pytest_cache .mypy_cache .ruff_cache
