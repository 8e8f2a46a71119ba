# Each command sets up .venv by itself: Python 3.11+ is all a fresh machine needs.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help demo test soak lint format results clean

help:
	@echo "make demo    learn five tasks one after another and show the result"
	@echo "make test    lint, types and the whole test suite"
	@echo "make soak    kill a run 30 times, fuzz all that reads files, and write the figures down"
	@echo "make lint    ruff and mypy alone"
	@echo "make format  let ruff rewrite what it can"
	@echo "make results write the tables in the docs from the summaries in results/"

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "cclis needs Python 3.11 or newer; name one with: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(READY)
	$(BIN)/cclis train

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest -n auto --cov=cclis --cov-report=term-missing:skip-covered --cov-fail-under=95

soak: $(READY)
	CCLIS_KILLS=30 CCLIS_INPUTS=2000 CCLIS_SOAK=results/experiments/soak/figures.json $(BIN)/pytest -m 'soak or fuzz'

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

results: $(READY)
	$(BIN)/python tools/house.py docs/house.svg
	$(BIN)/python -m tools.tables results README.md docs/results.md docs/reliability.md

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage*
