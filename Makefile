# Every target sets up its own virtual environment when there is none, and is quick the second time.
#
#   make demo   train a small Sinkhorn teacher on the packaged images, compile it, print the table
#   make test   run the tests in two processes (PYTEST_ARGS="-k masks" for other options)
#   make slow   run the tests that `make test` leaves out: notebooks, studies, the demo (4 minutes)
#   make bench  measure speed and memory and write the tables in docs/results/bench (32 minutes)
#   make gpu    check and measure on an accelerator, with the Python that has JAX (12 minutes)
#   make quick  run the tests of the library's core, a few minutes, for daily work
#   make docs   write the documentation site to docs/_build/html (3 minutes)
#   make fuzz   run 10,000 random cases; each failure prints the command that repeats it
#   make lint   check style, formatting and types
#   make dist   build the wheel and the source archive in dist/, and try the wheel
#   make clean  remove the virtual environment

PYTHON ?= python3
PYTEST_ARGS ?= --numprocesses=2 --dist=worksteal -m "not slow"
FUZZ_ARGS ?= --cases 10000 --seed 0
QUICK := tests/test_*.py tests/solvers tests/predictor tests/features tests/whole/test_architecture.py

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo test slow quick bench gpu docs fuzz lint dist clean
.NOTPARALLEL:

help:
	@sed -n 's/^#   //p' Makefile

demo: $(VENV)/.installed-demo
	$(BIN)/python -m train demo

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(PYTEST_ARGS)

slow: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m slow

quick: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(PYTEST_ARGS) $(QUICK)

bench: $(VENV)/.installed-test
	$(BIN)/python -m train bench layer --out docs/results/bench
	GLIBC_TUNABLES=glibc.malloc.hugetlb=1 $(BIN)/python -m train bench layer --out docs/results/bench/huge_pages
	$(BIN)/python -m train bench features --out docs/results/bench
	$(BIN)/python -m train bench floor --out docs/results/bench
	$(BIN)/python -m train bench trace --out docs/results/bench
	$(BIN)/python -m train bench teacher --out docs/results/bench
	$(BIN)/python -m train bench memory --out docs/results/bench
	$(BIN)/python -m train bench long --out docs/results/bench
	$(BIN)/python -m train bench sharded --out docs/results/bench

# No virtual environment: a machine with an accelerator brings its own JAX. The page is written again
# after every line, so a run that is cut off leaves what it has.
gpu:
	$(PYTHON) -m train bench gpu --out docs/results/bench

# Every warning, a broken link among them, is an error. -E builds from nothing, so that outputs of
# notebooks and signatures are those of the present code.
docs: $(VENV)/.installed-docs
	$(BIN)/python -m sphinx -W --keep-going -E -q docs docs/_build/html

fuzz: $(VENV)/.installed-test
	$(BIN)/python -m tests.fuzz $(FUZZ_ARGS)

lint: $(VENV)/.installed-lint
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

# The wheel is tried in an empty environment, outside the checkout, so that nothing of it is found.
dist: $(VENV)/.installed-dist
	rm -rf dist build/smoke
	$(BIN)/python -m build --outdir dist
	$(PYTHON) -m venv build/smoke
	build/smoke/bin/python -m pip install --quiet --disable-pip-version-check dist/*.whl
	cd build/smoke && bin/python -I ../../tests/smoke.py

clean:
	rm -rf $(VENV)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# A stamp is newer than pyproject.toml once its extras are in, so nothing is installed again.
$(VENV)/.installed-demo: pyproject.toml | $(BIN)/python
	@echo 'installing asap_jax with its train extra in $(VENV): JAX, Flax, TFDS, orbax, matplotlib; a few minutes'
	$(PIP) --editable '.[train]'
	@touch $@

$(VENV)/.installed-test: pyproject.toml | $(BIN)/python
	@echo 'installing asap_jax with its extras train, export and test in $(VENV); a few minutes'
	$(PIP) --editable '.[train,export,test]'
	@touch $@

$(VENV)/.installed-docs: pyproject.toml | $(BIN)/python
	@echo 'installing asap_jax with its train extra, and Sphinx, in $(VENV); a few minutes'
	$(PIP) --editable '.[train,docs]'
	@touch $@

$(VENV)/.installed-lint: pyproject.toml | $(BIN)/python
	@echo 'installing asap_jax, ruff and mypy in $(VENV)'
	$(PIP) --editable '.[lint]'
	@touch $@

$(VENV)/.installed-dist: pyproject.toml | $(BIN)/python
	@echo 'installing build in $(VENV)'
	$(PIP) 'build>=1.2'
	@touch $@
