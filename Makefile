# Needs Python 3.11 or newer and make; everything else is installed into .venv.

PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
WORKERS ?= 2
TRITON ?= 3.9.0
PYTEST_ARGS ?=
HUNTS ?= budgets damage kills steps

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := dev,docs,cpu,gpu,cli,data,report,export,serve,torchrec-cpu
TORCHREC := torchrec==1.8.0

# Each test worker is one process: one compute thread apiece keeps them from competing for the cores.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 MPLBACKEND=Agg

.DEFAULT_GOAL := help
.PHONY: help install test triton hunt lint format demo serve bench docs dist clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

install: $(STAMP) ## set up .venv with the package (editable) and all its extras

# The constraints are also set by environment so that they reach the isolated build of the package itself.
# TorchRec and the libraries that tests compress come without their dependencies, which name other builds of torch.
$(STAMP): pyproject.toml constraints.txt tests/foreign.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
		$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[$(EXTRAS)]"
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps $(TORCHREC) -r tests/foreign.txt
	touch $@

test: install ## run every test, the docstrings' examples and the documents' code (PYTEST_ARGS="-k name")
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) $(PYTEST_ARGS)

triton: install ## run the GPU kernels' tests in the interpreter of another Triton (TRITON=3.9.0), beside .venv
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target build/triton-$(TRITON) triton==$(TRITON)
	$(TEST_ENV) PYTHONPATH=build/triton-$(TRITON) $(BIN)/python -m pytest -n $(WORKERS) \
		-m "kernels(device='gpu')" tests/ops/gpu $(PYTEST_ARGS)

hunt: install ## damaged files, kills, drawn steps by the thousand, into benchmarks/results/hunt (an hour)
	mkdir -p benchmarks/results/hunt
	for hunt in $(HUNTS); do \
		$(TEST_ENV) PYTHONPATH=tests $(BIN)/python -m hunt.$$hunt > benchmarks/results/hunt/$$hunt.json || exit 1; done

lint: install ## check style, format, types and import direction
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install ## rewrite the code in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: install ## show the library at work
	$(BIN)/quorem demo

serve: build/serve/model.onnx ## serve a model of made-up clicks on port 8000; docs/serve.md has a request for it
	$(BIN)/python examples/serve.py build/serve/model.onnx

build/serve/model.onnx: | install
	rm -rf build/serve && mkdir -p build/serve
	cd build/serve && export PATH=$(CURDIR)/$(BIN):$$PATH \
		&& quorem synthesize clicks.csv --rows 20000 \
		&& quorem prepare table clicks.csv data --label click --vocabulary train \
		&& quorem train --data data --budget 500kB --out run \
		&& quorem export run --bits 8 --out model.onnx

bench: install ## run the CPU kernels' tests, then measure speed
	$(TEST_ENV) $(BIN)/python -m pytest -q -m "kernels(device='cpu')" tests
	$(BIN)/quorem bench

docs: install ## make the site of the documents: build/site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: install ## build the wheel and the source distribution into dist/
	$(BIN)/python -m build --no-isolation

clean: ## remove .venv, caches and build outputs
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
