# `make demo` and `make test` need nothing before them: both set the environment up first.
PYTHON ?= python3
VENV   ?= .venv
READY  := $(VENV)/.ready
RUN    := OMP_NUM_THREADS=1 $(VENV)/bin/

.PHONY: help setup demo docs test test-integrations test-slow test-faults audit bench lint types check clean

help:  ## Show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(READY)  ## Make the virtual environment

$(READY): pyproject.toml constraints.txt
	@echo "Setting up $(VENV) (a few minutes the first time) ..."
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
# Apart from the others, for the tests alone: torchmetrics imports torchvision where it finds it, and the one built for torch with CUDA
# fails beside torch without (tests/site/torchvision_finder.py).
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --no-deps --target $(VENV)/torchvision --upgrade torchvision timm
	@touch $@

DEMO := --set text.sequences=896 --set text.context=64 --set text.width=64 --set glyphs.images=640 --batch-size 64 --epochs 6

demo: $(READY)  ## Compare natural Muon and K-FAC with AdamW and Muon on two built-in tasks (about 4 minutes)
	$(RUN)natgrad compare text glyphs $(DEMO) --optimizers natural-muon,kfac,adamw,muon --workers 2 --first-seed 100 --tuned examples/demo --out runs/demo

# With MALLOC_PERTURB_ glibc fills new memory with 0xfe, so that a test that reads what nothing has written fails each time.
test: export MALLOC_PERTURB_ = 1
test: $(READY)  ## Run the tests (COVERAGE=1: measure their branch coverage, which must be at least 90 %)
ifdef COVERAGE
	rm -f .coverage .coverage.*
	$(RUN)python -m coverage run -m pytest -m "not slow" -n auto --dist loadfile
	$(RUN)python -m coverage combine --quiet
	$(RUN)python -m coverage report --fail-under=90
else
	$(RUN)python -m pytest -m "not slow" -n auto --dist loadfile
endif

test-integrations:  ## Run the tests inside transformers, Accelerate, PEFT, Lightning and timm, in an environment of their own
	$(PYTHON) -m venv $(VENV)-integrations
	$(VENV)-integrations/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[integrations]'
	OMP_NUM_THREADS=1 $(VENV)-integrations/bin/python -m pytest tests/integrations -n auto --dist loadfile

docs: $(READY)  ## Build the documentation site into site/; a warning is an error
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(VENV)/bin/mkdocs build --quiet

test-slow: $(READY)  ## Run the tests that take minutes
	$(RUN)python -m pytest -m slow

test-faults: $(READY)  ## Check that each seeded fault fails a test (PART=k/n: only each n-th, from the k-th on)
	$(RUN)python -m tests.faults $(if $(PART),--part $(PART))

audit: $(READY)  ## Look the pinned versions up in the advisories of PyPI (needs a network)
	$(VENV)/bin/python -m pip install --quiet pip-audit
	$(VENV)/bin/python -m pip_audit --requirement constraints.txt --no-deps --disable-pip --strict

bench: $(READY)  ## Run every benchmark; results go to benchmarks/results
	$(RUN)python -m benchmarks.gram
	$(RUN)python -m benchmarks.step
	$(RUN)python -m benchmarks.memory
	$(RUN)python -m benchmarks.curvature

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(READY)
	$(VENV)/bin/mypy

check: lint types docs test  ## Lint, types, documentation and tests: what CI runs before a part of the faults

clean:
	rm -rf $(VENV) $(VENV)-integrations runs .pytest_cache .mypy_cache .ruff_cache
