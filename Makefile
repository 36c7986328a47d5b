.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DOCS := $(VENV)/.docs
# Two test workers with one thread each are faster than one worker with two threads.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
# Each worker gets one half of the tests in their order, so that what the tests of a file share is made once.
WORKERS := -n 2 --dist worksteal

.PHONY: help demo test test-full lint bench pages docs package clean

help:            ## this list
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed 's/:.*##/:/' | column -t -s:

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,sdp,onnx]'
	touch $@

demo: $(READY)   ## set up, train on the embedded digits, certify, report
	$(BIN)/lipcert train

lint: $(READY)   ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint       ## set up, lint, run the tests
	$(TEST_ENV) $(BIN)/pytest $(WORKERS)

test-full: $(READY)   ## the property tests at full length
	$(TEST_ENV) LIPCERT_FULL=1 $(BIN)/pytest $(WORKERS)

bench: $(READY)  ## speed and memory, as ratios measured side by side
	$(BIN)/python -m benchmarks

$(DOCS): $(READY)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

pages: $(DOCS)   ## build the documentation in build/docs
	$(TEST_ENV) $(BIN)/sphinx-build -W --keep-going -q -d build/doctrees docs build/docs

docs: pages      ## build the documentation; its code and commands run
	$(TEST_ENV) $(BIN)/pytest tests/test_docs.py

package: $(READY) ## build the sdist and the wheel in build/dist and check what package indices will show
	rm -rf build/dist
	$(BIN)/python -m build --no-isolation --outdir build/dist
	$(BIN)/twine check --strict build/dist/*

clean:           ## remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info src/*.egg-info
