# Everything runs in .venv, which the first target makes with Python >= 3.11. Compiling a model takes a C++ compiler.
#   make test TORCH=torch==2.11.0                      another torch
#   make test PYTHON=/path/to/python TORCH=installed   the torch that this Python has, a GPU build say
#   make clean test EXTRAS=dev,demo                    without other compilers, whose tests are then skipped
# A .venv remembers its choice until TORCH or EXTRAS says otherwise; "make clean" forgets it.
PYTHON ?= python3
PYTEST_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
# What is installed is the names of stamps, .venv/for-TORCH@EXTRAS: the demo needs less than the tests.
STAMPS := $(notdir $(shell ls -t $(VENV)/for-*@* 2>/dev/null))
TORCH ?= $(or $(patsubst for-%,%,$(firstword $(subst @, ,$(firstword $(STAMPS))))),constraints.txt)
ALL := dev,demo,tvm,openvino,onnxruntime,torchao,ray
EXTRAS ?= $(or $(lastword $(subst @, ,$(firstword $(filter-out %@demo,$(STAMPS))))),$(ALL))
READY := $(VENV)/for-$(TORCH)@$(EXTRAS)
WITH_DEMO := $(foreach stamp,$(filter for-$(TORCH)@%,$(STAMPS)),$(if $(findstring demo,$(stamp)),$(stamp)))
READY_FOR_DEMO := $(VENV)/$(or $(firstword $(WITH_DEMO)),for-$(TORCH)@demo)
FRAMEWORKS := $(VENV)/frameworks
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal --benchmark-disable
# Each process would compile what it imports again.
unexport PYTHONDONTWRITEBYTECODE

# All share one cache, which is empty at first, so that each candidate compiles only what is new.
COMPARE := BACKEND_KWARGS_STORE=$(CURDIR)/.demo/decisions TORCHINDUCTOR_CACHE_DIR=$(CURDIR)/.demo/cache $(BIN)/backend-kwargs compare --quick --rounds 15
BACKENDS := eager,inductor,tmpl-inductor:freezing

ifeq ($(TORCH),constraints.txt)
  WANTED := -c constraints.txt
else ifneq ($(TORCH),installed)
  WANTED := "$(TORCH)"
endif

define NO_TORCH
Not installed. If pip found no torch==2.13.0+cpu, set PIP_EXTRA_INDEX_URL to the index of CPU wheels that the "Get Started" page of PyTorch names, or take another build: make TORCH=torch==2.13.0 (on Linux gigabytes of CUDA), or TORCH=installed for the one this Python has.
endef

.PHONY: help demo quick test test-landing test-avx2 test-all nightly slow test-frameworks test-kills bench overhead mutants docs check fix clean
help:
	@echo "make demo | quick | test | test-landing | test-avx2 | test-all | nightly | test-frameworks | test-kills | bench | overhead | mutants | docs | check | fix | clean"

demo: $(READY_FOR_DEMO)
	@rm -rf .demo/cache .demo/decisions
	@mkdir -p .demo
	@echo "1 of 2: a sentence encoder under eager, torch.compile, freezing and auto, about a minute"
	@$(COMPARE) examples/sentence_encoder.py:build --backends '$(BACKENDS),tmpl-inductor:auto[budget_s=10]' -o .demo/sentence_encoder.html
	@echo "2 of 2: a network of convolutions; auto may freeze too; half a minute"
	@$(COMPARE) examples/digits.py:build --backends '$(BACKENDS),tmpl-inductor:auto[freezing=true,budget_s=10]' -o .demo/digits.html
	@echo "Open .demo/sentence_encoder.html and .demo/digits.html in a browser."

# The tests of the folders that differ from main, or from another branch: make quick SINCE=HEAD
quick: $(READY)
	$(PYTEST) -m "not slow" $(PYTEST_ARGS) $$($(BIN)/python -m tests.changed $(SINCE))

test: $(READY)
	$(PYTEST) -m "not slow" --ignore tests/frameworks $(PYTEST_ARGS)

# What .ci/run runs: all but the tests of NIGHTLY in tests/slow.py, each function of which is slow.
test-landing: $(READY)
	$(PYTEST) -m "not nightly" --ignore tests/frameworks $(PYTEST_ARGS)

# As on a processor without AVX-512 and bf16, where this one has them: engines do what the processor can. With a cache of
# its own: plain Inductor's key of a graph has no vector width, so that code for AVX-512 would be compiled for AVX2.
test-avx2: $(READY)
	TORCHINDUCTOR_CACHE_DIR=$(CURDIR)/$(VENV)/cache-avx2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2_VNNI $(PYTEST) -m "not nightly" tests/precision tests/sealing tests/backends/openvino \
	  tests/backends/test_engines.py tests/backends/test_engines_precision.py tests/auto/test_auto_precision.py tests/auto/test_auto_pinned_and_sealed.py $(PYTEST_ARGS)

test-all: $(READY)
	$(PYTEST) --ignore tests/frameworks $(PYTEST_ARGS)

# Once a night: what .ci/run leaves out, benchmarks, and servers that are killed while processes write.
nightly: bench test-kills
	$(PYTEST) -m nightly $(PYTEST_ARGS)

# Times every test: tests/seconds.txt has the seconds, tests/slow.txt lists what `make test` leaves out.
slow: $(READY)
	-$(PYTEST) --ignore tests/frameworks --junitxml $(VENV)/times.xml $(PYTEST_ARGS)
	$(BIN)/python tests/slow.py $(VENV)/times.xml

# The snippets of docs/frameworks.md, with the real packages, which have an environment of their own above .venv.
test-frameworks: $(FRAMEWORKS)/ready
	$(FRAMEWORKS)/bin/python -m pytest -n 2 --dist loadfile --benchmark-disable tests/frameworks $(PYTEST_ARGS)

# The stores' servers killed 200 times each while processes write: half an hour.
test-kills: $(READY)
	BACKEND_KWARGS_KILLS=200 $(BIN)/python -m pytest --benchmark-disable -s tests/stores/servers/test_kill.py $(PYTEST_ARGS)

# Every peer of the smoke suite, checked; its timings are nobody's verdict.
bench: $(READY)
	rm -rf .bench
	$(BIN)/python -m benchmarks run --suite smoke --device cpu --strict --out .bench/smoke.jsonl

# What a call through a backend costs beside plain torch.compile: recorded, never a test.
overhead: $(READY)
	$(BIN)/python -m pytest tests/test_overhead.py tests/auto/test_auto_overhead.py --benchmark-only

# Small changes planted at random, which the tests should notice: make mutants MODULES=accuracy,graphs/spelling SAMPLE=20 SEED=1 JOBS=2 LIMIT_S=600
# Quickly, and resumed by the same call: make mutants SAMPLE=200 SEED=54 JOBS=16 LIMIT_S=400 ARGS="--reaching --fast --each-s 40 --out .mutants.jsonl"
mutants: $(READY)
	@$(BIN)/python -c "import cosmic_ray" 2>/dev/null || $(BIN)/python -m pip install -q -e ".[mutants]"
	$(BIN)/python -m tests.mutants $(if $(MODULES),--modules $(MODULES)) $(if $(SAMPLE),--sample $(SAMPLE)) $(if $(SEED),--seed $(SEED)) $(if $(JOBS),--jobs $(JOBS)) $(if $(LIMIT_S),--limit-s $(LIMIT_S)) $(ARGS)

# The pages of docs/ as a site in site/, with every link checked.
docs: $(READY)
	@$(BIN)/python -c "import mkdocs" 2>/dev/null || $(BIN)/python -m pip install -q $(WANTED) -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tests.docs_tables
	$(BIN)/python -m tests.option_names
	$(BIN)/python -m tests.function_sizes
	$(BIN)/python -m tests.private_names

fix: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV)

# A stamp that is missing, where another one is there for the same torch, only adds to .venv.
$(VENV)/for-%: pyproject.toml constraints.txt
	@test -n "$(filter for-$(TORCH)@%,$(STAMPS))" || $(MAKE) --no-print-directory $(VENV)
	@echo "Installing for $(lastword $(subst @, ,$*)) into $(VENV): half a minute with uv, which pip installs if it is missing."
	@.ci/install $(VENV) $(WANTED) -e ".[$(lastword $(subst @, ,$*))]" || { echo '$(NO_TORCH)' >&2; exit 1; }
	@touch "$@"

$(FRAMEWORKS)/ready: $(READY)
	@$(call new_environment,$(FRAMEWORKS))
	@echo "Installing into $(FRAMEWORKS): half a minute with uv."
	@.ci/install $(FRAMEWORKS) $(WANTED) -e ".[dev,onnxruntime,frameworks]"
	@touch "$@"

.PHONY: $(VENV)
$(VENV):
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "Python 3.11 or newer is needed, this is %d.%d: make PYTHON=..." % v[:2])'
	@$(call new_environment,$(VENV))

# Not --system-site-packages: of a Python that lies in a virtual environment, that shows the one below.
PACKAGES := import sys, torch; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")
define new_environment
$(PYTHON) -m venv --clear $(1)$(if $(filter installed,$(TORCH)), && $(PYTHON) -c '$(PACKAGES)' >$(1)/paths && mv $(1)/paths "$$(echo $(1)/lib/python*/site-packages)/packages-of-another.pth")
endef
