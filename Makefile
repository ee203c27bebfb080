# Needs Python 3.11 or newer, make and the package index; everything else goes into .venv.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: run test test-slow test-tpu test-browser test-all lint eval clean

run: .venv/.installed  ## install and run the demo
	@$(BIN)/chunkattn demo

# In two parts: XLA maps memory for every kernel it compiles for a CPU, and a process can have 65,530 maps on Linux.
# Two workers, for compiling takes longest, and mostly one core.
PARALLEL := -n 2 --dist loadfile
QUICK := $(PARALLEL) -m "not slow and not exhaustive and not tpu and not browser"
test: .venv/.installed-test  ## the quick tests; TEST_COSTS=1 prints what each file costs
	$(BIN)/python -m pytest $(QUICK) tests/test_[a-o]*.py chunkattn
	$(BIN)/python -m pytest $(QUICK) tests/test_[p-z]*.py

test-slow: .venv/.installed-test  ## the longer tests that CI runs for every change
	$(BIN)/python -m pytest $(PARALLEL) -m "slow and not exhaustive and not tpu and not browser"

# The compiler lies apart from the rest: where it can be imported, JAX looks for a TPU.
test-tpu: .venv/.installed-test .cache/libtpu/.installed  ## the TPU kernels, compiled for one chip; needs no TPU
	PYTHONPATH=.cache/libtpu $(BIN)/python -m pytest -m "tpu and not exhaustive"

test-browser: .venv/.installed-test  ## the page in Chromium; needs Debian's packages chromium and chromium-driver
	$(BIN)/python -m pytest -m browser tests/test_browser.py

test-all: lint test test-slow test-tpu test-browser  ## everything; run before an issue is resolved
	$(BIN)/python -m pytest $(PARALLEL) -m "exhaustive and not tpu and not browser"
	PYTHONPATH=.cache/libtpu $(BIN)/python -m pytest -m "tpu and exhaustive"

lint: .venv/.installed-test  ## style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

eval: .venv/.installed  ## the demo model on held-out worlds
	$(BIN)/python -m training.evaluate

clean:
	rm -rf .venv .cache build dist

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "chunkattn needs Python 3.11 or newer; set PYTHON=...")'
	@$(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }
	@$(BIN)/pip install --quiet --upgrade pip

.venv/.installed: .venv/bin/python pyproject.toml
	@echo "Installing chunkattn into .venv (a minute or two, the first time only)"
	@$(BIN)/pip install --quiet --editable .
	@touch $@

.venv/.installed-test: .venv/.installed
	@echo "Installing the test tools (PyTorch among them) into .venv"
	@$(BIN)/pip install --quiet --editable '.[test]'
	@touch $@

# The libtpu that `.[tpu]` would install: the one that the installed JAX's own extra asks for.
LIBTPU := from importlib.metadata import requires; print(next(r.split(";")[0] for r in requires("jax") if r.startswith("libtpu")))
.cache/libtpu/.installed: .venv/.installed
	@echo "Installing the TPU compiler into .cache/libtpu"
	@$(BIN)/pip install --quiet --no-deps --upgrade --target .cache/libtpu "$$($(BIN)/python -c '$(LIBTPU)')"
	@touch $@
