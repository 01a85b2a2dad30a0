# FluxTrain. `make` or `make help` lists the targets; each sets up what it needs in .venv.

PYTHON ?=
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
NATIVE_SOURCES := $(shell find native -type f 2>/dev/null)
TESTS ?= tests
# Processes that tests start are many: our modules are compiled once. Three workers on two cores, as
# many tests wait for what they draw.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest

export PYTHON

.PHONY: help run dev native check lint test test-native test-formats test-torch test-gpu test-transformers4 bench-cpu bench-gpu bench-tui soak soak-serve test-learn screenshots wheel test-wheel image notebook docs clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/\1|\2/' \
		| while IFS='|' read -r name text; do printf '  make %-18s %s\n' "$$name" "$$text"; done

run: $(STAMPS)/native ## open the app (without a terminal: train the demo headless)
	@if [ -t 0 ] && [ -t 1 ] && [ -n "$$TERM" ] && [ "$$TERM" != dumb ]; then \
		exec $(BIN)/fluxtrain-tui; \
	else \
		$(BIN)/fluxtrain train --demo && \
		echo "This was the demo without the app: run \`make run\` in a terminal to see it live."; \
	fi

dev: $(STAMPS)/native $(STAMPS)/dev ## everything needed to work on FluxTrain

native: $(STAMPS)/runtime ## rebuild the native library
	@.ci/setup native && touch $(STAMPS)/native

check: lint test ## lint and test, as continuous integration does

lint: dev ## ruff, mypy --strict, types of tests and bench, import contracts and circles
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/python -m mypy --config-file .ci/mypy-tests.ini
	$(BIN)/python $(BIN)/lint-imports
	$(BIN)/python .ci/check_imports.py engine/fluxtrain fluxtui

test: dev test-native ## native tests, then pytest without gpu and slow tests
	$(PYTEST) -n 3 -m "not gpu and not slow" $(TESTS)

test-native: dev ## the C++ kernels against their scalar reference
	@$(BIN)/cmake -S native -B build/native-tests -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
		-DFLUX_NATIVE_TESTS=ON > build/native-tests.log && $(BIN)/cmake --build build/native-tests >> build/native-tests.log \
		|| { cat build/native-tests.log; exit 1; }
	$(BIN)/ctest --test-dir build/native-tests --output-on-failure --no-tests=ignore

test-gpu: dev ## the tests that need an NVIDIA GPU (make test-gpu WORKERS=14: together, on all GPUs)
	$(BIN)/python -m pytest -n $(or $(WORKERS),0) -m "gpu and not slow and not alone" $(TESTS)
	$(BIN)/python -m pytest -m "gpu and alone and not slow" -n 0 tests/gpu

test-transformers4: dev $(STAMPS)/transformers4 ## saved models in transformers 4, in an environment of its own
	FLUXTRAIN_TRANSFORMERS4=$(CURDIR)/$(VENV)/transformers4/bin/python $(PYTEST) tests/transformers4

test-formats: dev ## the runs that released versions made, opened and resumed by this one
	$(PYTEST) tests/formats

test-torch: dev ## the tests with another torch: make test-torch TORCH=2.11.0 (or newest, nightly)
	@.ci/test_torch $(TORCH) $(TESTS)

soak: dev $(STAMPS)/llama-cpp ## the long tests: many kills and resumes, random models, new examples of properties
	FLUXTRAIN_LLAMA_CPP=$(CURDIR)/$(VENV)/llama-cpp/bin/python $(PYTEST) -m "slow and not gpu" --timeout 3600 $(TESTS)
	FLUXTRAIN_EXPLORE=1 $(PYTEST) -n 2 -m "not gpu and not slow" $(shell grep -rlE "hypothesis" tests --include=test_*.py)

soak-serve: dev ## kill servers and trainers at random, each job succeeds once (DB=postgresql: on Postgres)
	FLUXTRAIN_TEST_DB=$(DB) $(PYTEST) $(if $(DB),,-m slow) --timeout 3600 tests/serve

test-learn: dev ## the learning path: right solutions and typical mistakes of its eight tasks
	$(PYTEST) tests/learn

bench-cpu: $(STAMPS)/native ## the native optimizer against the memory's own speed
	$(BIN)/python bench/bench_cpu.py

bench-gpu: $(STAMPS)/native $(STAMPS)/gpu ## FluxTrain beside the loops without it on the GPU, into docs/benchmarks.md
	$(BIN)/python bench/bench_table.py --write

bench-tui: $(STAMPS)/native ## what the app costs
	$(BIN)/python bench/bench_tui.py

screenshots: dev ## draw screenshots/ from a recorded run
	$(BIN)/python bench/screenshots.py

wheel: $(STAMPS)/wheel ## build dist/: wheel, sdist and fluxtrain-tui, checked for the package index
	@.ci/wheels build

test-wheel: wheel ## install dist/ without a compiler, then the sdist with one; train the demo from both
	@.ci/wheels test

image: wheel ## the container `fluxtrain`, from the wheel
	@docker info > /dev/null 2>&1 || { echo "fluxtrain: Docker does not answer: start its engine, or see docs/installing.md" >&2; exit 1; }
	docker build -t fluxtrain -f release/Dockerfile dist

notebook: dev $(STAMPS)/notebook ## run examples/zero_to_hero.ipynb, about four minutes
	@$(VENV)/notebook/bin/python .ci/run_notebook.py

docs: $(STAMPS)/docs ## the site, into build/site; a link that leads nowhere fails
	@.ci/site

clean: ## remove what was built, keep .venv and runs
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

# --- set-up: one stamp per step, so that a second call starts at once -------------------------

$(STAMPS)/python:
	@.ci/setup python && mkdir -p $(STAMPS) && touch $@

$(STAMPS)/runtime: pyproject.toml constraints.txt | $(STAMPS)/python
	@.ci/setup runtime && touch $@

$(STAMPS)/native: $(STAMPS)/runtime $(NATIVE_SOURCES)
	@.ci/setup native && touch $@

$(STAMPS)/dev: $(STAMPS)/runtime
	@.ci/setup dev && touch $@

$(STAMPS)/gpu: $(STAMPS)/runtime
	@.ci/setup gpu && touch $@

$(STAMPS)/transformers4: $(STAMPS)/runtime
	@.ci/setup transformers4 && touch $@

$(STAMPS)/llama-cpp: $(STAMPS)/python
	@.ci/setup llama-cpp && touch $@

$(STAMPS)/wheel: $(STAMPS)/python
	@.ci/setup wheel && touch $@

$(STAMPS)/docs: $(STAMPS)/python
	@.ci/setup docs && touch $@

$(STAMPS)/notebook: $(STAMPS)/python
	@.ci/setup notebook && touch $@
