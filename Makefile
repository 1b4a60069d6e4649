# make demo    train a small model in several formats and compare (sets up .venv on the first run)
# make test    all tests, doctests and the Python blocks of the pages
# make check   what CI runs: format, lint, types, layers, docs, then the tests
# make kernels every kernel for every architecture, without a GPU: registers and spills (minutes)
# make docs    the pages, in site/
#
# PY=python3 uses an interpreter that has everything: no set-up, no network.
# PYTHON=python3.12 names the one that .venv is made from. TORCH=... and TORCH_FLAGS=... choose its torch.

VENV   := .venv
TORCH  ?= torch==2.13.0
PYTHON ?= python3
PY     := $(VENV)/bin/python
PIP     = $(PY) -m pip --disable-pip-version-check install -qq
PYTEST  = $(PY) -m pytest -n auto $(PYTEST_FLAGS)

# Read when OpenMP loads: without it two torch processes on two cores spin and run some 40 times slower.
export OMP_WAIT_POLICY ?= passive
export PYTHONPATH := $(CURDIR)

ifeq ($(PY),$(VENV)/bin/python)
RUN := $(VENV)/.run
DEV := $(VENV)/.dev
endif

.PHONY: demo test check kernels docs size clean
.DELETE_ON_ERROR:

demo: $(RUN)
	$(PY) -m te_ops train

test: $(DEV)
	$(PYTEST)

# Cheap things first, pytest last: its closing line is the last thing printed.
check: $(DEV)
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) -c 'from importlinter.cli import lint_imports_command as run; run()'
	$(PY) -m sphinx -W --keep-going -q -b html docs site
	$(PYTEST) --shuffle $$(date +%Y%j)

kernels: $(DEV)
	$(PY) -m scripts.kernel_report
	$(PY) -m scripts.cutlass_report

docs: $(DEV)
	$(PY) -m sphinx -W --keep-going -q -b html docs site

size:
	@$(PYTHON) scripts/size.py

clean:
	rm -rf $(VENV) site dist runs docs/api/modules

# torch first and alone: then "torch>=2.11" of anything else leaves it as it is.
$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "te_ops needs Python 3.11 or newer: make PYTHON=python3.11")'
	@echo "Making $(VENV) with $(TORCH) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) "$(TORCH)" $(TORCH_FLAGS)
	@touch $@

$(VENV)/.run: pyproject.toml $(VENV)/.torch
	@$(PIP) -e '.[demo]'
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.torch
	@$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.run
