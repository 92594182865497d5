# Every target makes .venv ready by itself (.ci/setup), from a shell with no environment activated.
# Another Python: make PYTHON=python3.12 test. Some tests: make test TESTS=tests/store
# How many at a time: make test JOBS=4. Each has a Spark of its own; 0 is one after the other, in this process.
# The second of four parts of the tests: make slow PART=2/4, make compat PART=2/4.

TESTS ?=
JOBS ?= 2
BIN := .venv/bin
export PYTHON
export PYTHONUNBUFFERED := 1
# Settings of another Spark or Python installation must not reach into .venv.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV
unexport SPARK_HOME SPARK_CONF_DIR PYSPARK_PYTHON PYSPARK_DRIVER_PYTHON PYSPARK_SUBMIT_ARGS

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup notebook-packages site-packages site demo notebooks outputs gallery test slow lint torture mutants compat \
	bench wheel clean

help: ## this list
	@echo "Targets, each with its own set-up:"
	@sed -n 's/^\([a-z]*\): .*## /  make \1#/p' Makefile | awk -F'#' '{ printf "%-15s %s\n", $$1, $$2 }'

demo: setup ## stream a store that a real RocketMQ wrote to the console (a minute, or three on a slow machine)
	@$(BIN)/python notebooks/demo.py

notebooks: notebook-packages ## run every notebook from top to bottom, without a browser (a few minutes)
	@$(BIN)/python -P -m pytest -m notebooks -rsfE -s -o faulthandler_timeout=1800 $(or $(TESTS),tests/test_notebooks.py)

outputs: notebook-packages ## run every notebook, and store its outputs in it (a few minutes)
	@$(BIN)/python -P gallery/run_notebooks.py

gallery: site-packages ## make pages of the documentation site from the notebooks, in docs/gallery
	@$(BIN)/python -P gallery/pages.py

# Without bytecode each of the hundreds of processes that Spark starts would compile all modules anew.
test: lint ## lint, then the default tests
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -P -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder \
		--max-worker-restart 0 $(TESTS)

slow: setup ## the tests marked `slow`: many seeds, many processes (half an hour)
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -P -m pytest -m slow -n $(JOBS) --max-worker-restart 0 \
		--durations 20 $(if $(PART),--part $(PART)) $(TESTS)

lint: setup ## style, format, types: all three, also when the first finds something
	@echo "Lint: ruff check, ruff format, mypy ..."
	@bad=0; \
	$(BIN)/ruff check --output-format concise . || bad=1; \
	$(BIN)/ruff format --check . || bad=1; \
	$(BIN)/mypy || bad=1; \
	exit $$bad

# TORTURE=10: ten times as long. TORTURE_MINUTES=5: five minutes. TORTURE_SEED, TORTURE_STAGES: of tests/torture/run.py.
torture: setup ## kills, faults, interrupts, mutations, frames, clocks, pipelines: all at random, an hour (Java, gcc)
	@$(BIN)/python tests/torture/run.py \
		--minutes $(or $(TORTURE_MINUTES),$(shell expr 55 \* $(or $(TORTURE),1))) \
		$(if $(TORTURE_SEED),--seed $(TORTURE_SEED)) $(if $(TORTURE_STAGES),--stages "$(TORTURE_STAGES)")

mutants: setup ## alter every field that is written or read, one at a time: does a test notice? (an hour)
	@$(BIN)/python tests/mutation/run.py

compat: setup ## with a real RocketMQ (Java and Maven): its stores and ours, both ways
	@$(BIN)/python -P -m pytest -m compat -rsfE -n $(JOBS) --dist loadfile --no-loadscope-reorder \
		--max-worker-restart 0 --durations 30 $(if $(PART),--part $(PART)) $(or $(TESTS),tests/compat)

bench: setup ## measure speed
	@$(BIN)/python benchmarks/run.py

wheel: setup ## build wheel and source archive, check both, and run the tests marked `wheel` against the wheel
	@.ci/wheel

site: site-packages gallery ## build the documentation site into site/, and check its links
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -P -m mkdocs --quiet build --clean --strict
	@$(BIN)/python -P .ci/site_check.py site

clean: ## remove what the other targets made
	@rm -rf .venv build dist site docs/gallery rmq_spark.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

setup: ## make .venv ready (the others do it)
	@.ci/setup

notebook-packages: setup
	@$(BIN)/python -c 'import ipykernel, matplotlib, nbclient, pandas' 2>/dev/null || \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[notebooks]'

site-packages: setup
	@$(BIN)/python -c 'import material, mkdocs, mkdocstrings_handlers.python, matplotlib, nbconvert' 2>/dev/null || \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'

.DEFAULT:
	@echo "There is no target '$@'." >&2
	@$(MAKE) --no-print-directory help >&2
	@exit 2
