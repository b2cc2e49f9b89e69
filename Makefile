# Everything runs in .venv, which the first target makes with Python >= 3.11. Compiling a model takes a C++ compiler.
#   make test TORCH=torch==2.11.0                      another torch
#   make test PYTHON=/path/to/python TORCH=installed   the torch that this Python has, a GPU build say
#   make clean test EXTRAS=dev,demo                    without other compilers, whose tests are then skipped
# A .venv remembers its choice until TORCH says otherwise; "make clean" forgets it.
PYTHON ?= python3
PYTEST_ARGS ?=
EXTRAS ?= dev,demo,tvm,openvino,onnxruntime,torchao,ray
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= $(or $(patsubst $(VENV)/ready-%,%,$(firstword $(wildcard $(VENV)/ready-*))),constraints.txt)
READY := $(VENV)/ready-$(TORCH)
FRAMEWORKS := $(VENV)/frameworks
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal --benchmark-disable

# auto is permitted what the other rows do: freezing.
BACKENDS := 'eager,inductor,tmpl-inductor:auto[freezing=true],tmpl-inductor:freezing,tmpl-inductor:cpp_wrapper,tmpl-inductor:max_autotune+freezing'

ifeq ($(TORCH),constraints.txt)
  WANTED := -c constraints.txt
else ifneq ($(TORCH),installed)
  WANTED := "$(TORCH)"
endif

define NO_TORCH
Not installed. If pip found no torch==2.13.0+cpu, set PIP_EXTRA_INDEX_URL to the index of CPU wheels that the "Get Started" page of PyTorch names, or take another build: make TORCH=torch==2.13.0 (on Linux gigabytes of CUDA), or TORCH=installed for the one this Python has.
endef

.PHONY: help demo quick test test-all slow test-frameworks test-kills bench overhead mutants docs check fix clean
help:
	@echo "make demo | quick | test | test-all | test-frameworks | test-kills | bench | overhead | mutants | docs | check | fix | clean"

demo: $(READY)
	@mkdir -p .demo
	$(BIN)/backend-kwargs compare examples/sentence_encoder.py:build --backends $(BACKENDS) --rounds 15 --html .demo/sentence_encoder.html
	$(BIN)/backend-kwargs compare examples/digits.py:build --backends $(BACKENDS) --rounds 15 --html .demo/digits.html
	@echo "Open .demo/sentence_encoder.html and .demo/digits.html in a browser."

# The tests of the folders that differ from main, or from another branch: make quick SINCE=HEAD
quick: $(READY)
	$(PYTEST) -m "not slow" $(PYTEST_ARGS) $$($(BIN)/python -m tests.changed $(SINCE))

test: $(READY)
	$(PYTEST) -m "not slow" --ignore tests/frameworks $(PYTEST_ARGS)

test-all: $(READY)
	$(PYTEST) --ignore tests/frameworks $(PYTEST_ARGS)

# Times every test, and lists in tests/slow.txt those that `make test` leaves out.
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

# Small changes planted at random, which the tests should notice: make mutants MODULES=accuracy,auto/cache_key SAMPLE=20 SEED=1 JOBS=2 LIMIT_S=600
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

$(READY): pyproject.toml constraints.txt
	@test -e "$@" || $(MAKE) --no-print-directory $(VENV)
	@echo "Installing into $(VENV): a minute or two, 2 GB."
	@$(BIN)/python -m pip install -q $(WANTED) -e ".[$(EXTRAS)]" || { echo '$(NO_TORCH)' >&2; exit 1; }
	@touch "$@"

$(FRAMEWORKS)/ready: $(READY)
	$(BIN)/python -m venv --clear $(FRAMEWORKS)
	@$(BIN)/python -c 'import sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")' >$(FRAMEWORKS)/paths
	@mv $(FRAMEWORKS)/paths "$$(echo $(FRAMEWORKS)/lib/python*/site-packages)/below.pth"
	@echo "Installing into $(FRAMEWORKS): a minute or two, 1.5 GB."
	@$(FRAMEWORKS)/bin/python -m pip install -q $(WANTED) -e ".[frameworks]"
	@touch "$@"

.PHONY: $(VENV)
$(VENV):
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "Python 3.11 or newer is needed, this is %d.%d: make PYTHON=..." % v[:2])'
	$(PYTHON) -m venv --clear $(VENV)
ifeq ($(TORCH),installed)
	@# Not --system-site-packages: of a Python that lies in a virtual environment, that shows the one below.
	@$(PYTHON) -c 'import sys, torch; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")' >$(VENV)/paths
	@mv $(VENV)/paths "$$(echo $(VENV)/lib/python*/site-packages)/installed-torch.pth"
endif
