# make demo    set up, run the gates, train the demo (no GPU needed)
# make test    set up, run every test that this machine can run, on both supported versions of megatron-core
# make lint    ruff
# make env     only the environment that python -m launch and python -m gates need, in .venv
# PYTHON=...   the interpreter to build the environment with (3.11 or later)
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
CONSTRAINTS := requirements/constraints.txt
MACHINE := $(shell uname -m)
# Each process of a test computes on one core: two of them side by side are faster than one on two cores.
export OMP_NUM_THREADS ?= 1
# Images of containers set it. Here each of some hundred processes would compile torch and Megatron for itself, for 9 seconds.
unexport PYTHONDONTWRITEBYTECODE
JOBS ?= 2
PYTEST_ARGS ?=
# A file's tests share what it sets up; the long files come first (tests/conftest.py), so that both ends come together.
PYTEST = $(PY) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
# Exit code 5: what PYTEST_ARGS selects is all in the other run.
NONE_SELECTED = || test $$? = 5 -a -n "$(PYTEST_ARGS)"

.PHONY: help env demo gates test test-core test-other test-mcore lint clean
help:
	@sed -n 's/^# \(make\|PYTHON\)/\1/p' Makefile

env: $(VENV)/run.stamp

demo: $(VENV)/run.stamp
	$(PY) -m gates --device cpu --tp 2 --sp
	$(PY) -m launch.demo

gates: $(VENV)/run.stamp
	$(PY) -m gates

test: test-core test-other

test-core: $(VENV)/test.stamp
	$(PYTEST) $(PYTEST_ARGS) $(NONE_SELECTED)

# The tests that depend on megatron-core, on the version that $(VENV) does not have: 0.19 in a Python 3.12 environment,
# with megatron.training, where there is a python3.12; else from an unpacked wheel.
PYTHON312 ?= $(shell for p in python3.12 $${PYENV_ROOT:-$$HOME/.pyenv}/versions/3.12*/bin/python3.12; do \
	$$p -c '' 2>/dev/null && command -v $$p && break; done)
test-other: $(VENV)/test.stamp
	@if $(PY) -c 'import sys; sys.exit(sys.version_info < (3, 12))'; then \
	    $(MAKE) --no-print-directory test-mcore; \
	elif [ -z "$(PYTHON312)" ]; then \
	    $(MAKE) --no-print-directory test-mcore && \
	    echo "NOT RUN: megatron.training 0.19, for want of a python3.12 (PYTHON312=... names one)"; \
	else $(MAKE) --no-print-directory VENV=.venv-py312 PYTHON=$(PYTHON312) test-megatron; fi

# 0.19 asks for Python 3.12 only for megatron.training: megatron.core is unpacked, put in front, and runs under 3.11 too.
test-mcore: $(VENV)/test.stamp $(VENV)/mcore.stamp
	PYTHONPATH=$(CURDIR)/$(VENV)/mcore $(PYTEST) -m megatron $(PYTEST_ARGS) $(NONE_SELECTED)

.PHONY: test-megatron
test-megatron: $(VENV)/test.stamp
	$(PYTEST) -m megatron $(PYTEST_ARGS) $(NONE_SELECTED)

lint: $(VENV)/test.stamp
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

# --no-compile: Python compiles what is imported, and keeps it: a part of what pip would compile, one file after the other.
$(VENV)/run.stamp: setup.py pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than 3.11: make PYTHON=python3.11"; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "$(PYTHON) cannot make virtual environments: apt-get install python3-venv"; exit 2; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --no-compile -c $(CONSTRAINTS) -e '.[launch]'
	touch $@

$(VENV)/test.stamp: $(VENV)/run.stamp
	$(PY) -m pip install --quiet --no-compile -c $(CONSTRAINTS) -e '.[launch,test]'
	touch $@

$(VENV)/mcore.stamp: $(VENV)/run.stamp
	rm -rf $(VENV)/mcore
	@if $(PY) -c 'import sys; sys.exit(sys.version_info >= (3, 12))'; then version=0.19.2; else version=0.16.1; fi; set -x; \
	$(PY) -m pip install --quiet --target $(VENV)/mcore --no-deps --only-binary=:all: --ignore-requires-python --python-version 3.12 \
	    --platform manylinux_2_28_$(MACHINE) --platform manylinux_2_24_$(MACHINE) --platform manylinux_2_17_$(MACHINE) megatron-core==$$version
	touch $@

clean:
	rm -rf .venv .venv-py312 .gates build *.egg-info
