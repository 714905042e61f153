# The commands for developers. They need make and Python 3.11 with venv, and install everything else into .venv.
PYTHON ?= python3
BIN := .venv/bin
# The suite starts a thousand processes. With this variable, each of them would compile Batchwright again.
unexport PYTHONDONTWRITEBYTECODE

# `make help` prints the targets that have a text after `##`, under the headings in the `##@` lines.
.DEFAULT_GOAL := help

.PHONY: bench bench-batch bench-idle bench-ingest bench-lists bench-plan bench-queue bench-scale bench-thousand bench-web chaos \
	chaos-batches chaos-crowd chaos-documents chaos-failover chaos-hosts chaos-queue chaos-tasks clean collect demo \
	docs help lint lock prices screenshots siege test test-external test-models test-perturbed test-postgres16 \
	test-thorough

##@ Start
help: ## List the targets
	@awk 'BEGIN { FS = ":.*## " } /^##@ / { printf "\n%s\n", substr($$0, 5) } \
		/^[a-zA-Z0-9_-]+:.*## / { printf "  %-16s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@printf '\nARGS="..." passes arguments on to chaos and bench targets, such as make bench-idle ARGS=--json\n'

# `make demo ARGS=--keep` keeps running, so that you can look at its dashboard.
demo: .venv/ready ## Run the demos: a batch and documents, with a killed worker
	@$(BIN)/batchwright demo $(ARGS)
	@$(if $(ARGS),,$(BIN)/batchwright demo --documents)

##@ Test
test: .venv/ready ## Run everything that continuous integration runs
	@$(MAKE) --no-print-directory --jobs 2 lint collect
	$(BIN)/pytest -n 4 --dist loadgroup

# Compile the tests for pytest once here, instead of once in each of its processes.
collect: .venv/ready
	@$(BIN)/pytest --collect-only --quiet --quiet > /dev/null

lint: .venv/ready ## Run ruff, mypy and the import contracts
	@! grep -rniI 'w[i]ndlass' --exclude=CHANGELOG.md --exclude-dir=.git --exclude-dir='.venv*' --exclude-dir='.*_cache' --exclude-dir=build \
		--exclude-dir=.hypothesis --exclude-dir=__pycache__ . || { echo 'lint: this is the old name of Batchwright'; exit 1; }
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache

# Other servers repeat only the tests of statements. These use commands or programs, or need no database.
ABOVE_STATEMENTS := $(addprefix --ignore tests/,\
	batches/commands batches/test_pages.py chaos cli conformance demo examples inference ingest/commands \
	ingest/test_pages.py perturbed providers/commands providers/test_pages.py siege simulator storage telemetry \
	test_private.py web/test_browser.py)
test-postgres16: .venv/ready ## Run the tests of statements on PostgreSQL 16
	BATCHWRIGHT_TEST_POSTGRES_MAJOR=16 $(BIN)/pytest -n 4 --dist loadgroup tests/access tests/db tests/engine tests/upgrade \
		tests/test_list_plans.py tests/test_states.py

# The tests that `make test` runs on one provider, on all others, and the long tests. The chaos tests run alone: their
# workers must keep their leases, and late requests are resent, which changes the counts.
test-thorough: .venv/ready ## Run the long tests, and those of every provider
	BATCHWRIGHT_TEST_THOROUGH=1 $(BIN)/pytest -n 4 --dist loadgroup -m 'thorough and not chaos'
	BATCHWRIGHT_TEST_THOROUGH=1 $(BIN)/pytest -m 'thorough and chaos'

# Only the server that BATCHWRIGHT_TEST_DATABASE_URL names; `make test` covers the embedded one.
test-external: .venv/ready ## Run the tests on the server of BATCHWRIGHT_TEST_DATABASE_URL
	BATCHWRIGHT_TEST_SERVERS=external $(BIN)/pytest -n 3 --dist loadgroup $(ABOVE_STATEMENTS)

# Every statement and every call is delayed at random, with changing seeds, until MINUTES are over or a test fails.
test-perturbed: .venv/ready ## Delay every statement and call at random; MINUTES=30 SEED=7
	$(BIN)/python -m tests.perturbed.run --minutes $(or $(MINUTES),30) $(addprefix --seed ,$(SEED)) $(ARGS)

# Whole batches on real model servers. A server that cannot be built here is skipped, with the reason.
test-models: .venv/ready ## Run whole batches on real model servers; builds them first
	test -e .venv-models/ready || { sh tests/models/build.sh && touch .venv-models/ready; } || true
	BATCHWRIGHT_TEST_MODELS=1 $(BIN)/pytest -rs tests/models

##@ Kill and break
chaos: chaos-queue chaos-batches chaos-crowd chaos-documents chaos-failover chaos-tasks ## Run all chaos tests except chaos-hosts

chaos-batches: .venv/ready ## Kill workers of a large batch
	$(BIN)/python -m tests.chaos.batches $(ARGS)

chaos-crowd: .venv/ready ## Send 1,000 small batches through slow workers
	$(BIN)/python -m tests.chaos.crowd $(ARGS)

chaos-documents: .venv/ready ## Kill workers of documents
	$(BIN)/python -m tests.chaos.documents $(ARGS)

chaos-failover: .venv/ready ## Fail over the database for half an hour
	$(BIN)/python -m tests.chaos.failover $(ARGS)

# One of two hosts in network namespaces is cut off. Needs root and `ip`, so `make chaos` leaves it out.
chaos-hosts: .venv/ready ## Cut off one of two hosts; needs root and ip
	$(BIN)/python -m tests.chaos.hosts $(ARGS)

chaos-queue: .venv/ready ## Kill workers of a queue
	$(BIN)/python -m tests.chaos.queue $(ARGS)

chaos-tasks: .venv/ready ## Kill workers of tasks
	$(BIN)/python -m tests.chaos.tasks $(ARGS)

siege: .venv/ready ## Attack the HTTP server in every way, while a normal client uses it
	$(BIN)/python -m tests.siege.siege $(ARGS)

##@ Measure
bench: bench-batch bench-idle bench-ingest bench-lists bench-plan bench-queue bench-scale bench-thousand bench-web ## Run all benchmarks

bench-batch: .venv-bench/ready ## Compare ways to send a file of requests
	.venv-bench/bin/python -m benchmarks.batch $(ARGS)

bench-idle: .venv-bench/ready ## Measure idle workers
	.venv-bench/bin/python -m benchmarks.idle $(ARGS)

bench-ingest: .venv-bench/ready ## Measure extraction and search
	.venv-bench/bin/python -m benchmarks.ingest $(ARGS)

bench-lists: .venv-bench/ready ## Measure lists over a million jobs
	.venv-bench/bin/python -m benchmarks.lists $(ARGS)

bench-plan: .venv/ready ## Measure how long it takes to check and plan a file
	$(BIN)/python -m benchmarks.plan $(ARGS)

bench-queue: .venv-bench/ready ## Compare with other queues
	.venv-bench/bin/python -m benchmarks.queue $(ARGS)

bench-scale: .venv-bench/ready ## Measure one batch on many workers
	.venv-bench/bin/python -m benchmarks.scale $(ARGS)

bench-thousand: .venv-bench/ready ## Send what a thousand idle workers send
	.venv-bench/bin/python -m benchmarks.thousand $(ARGS)

bench-web: .venv-bench/ready ## Measure every page of the dashboard over a million jobs
	.venv-bench/bin/python -m benchmarks.web $(ARGS)

##@ Maintain
docs: .venv/docs ## Write the generated pages, build the site and check its links
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo 'docs: open build/site/index.html'

screenshots: .venv/ready ## Take the pictures of the dashboard for the docs; needs Chromium
	$(BIN)/python docs/screenshots.py $(ARGS)

# The lists of prices come from the newest litellm on the package index.
prices: .venv/ready ## Update the lists of prices
	$(BIN)/python tools/prices.py $(ARGS)

# Pinned versions stay; `make lock ARGS=--upgrade` upgrades them. Every file of every version has its hash.
lock: ## Pin the dependencies again, with hashes
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/pip install --quiet --disable-pip-version-check uv
	.venv-lock/bin/uv pip compile --quiet --python .venv-lock/bin/python --python-version 3.11 --extra dev \
		--generate-hashes --no-strip-markers --no-annotate --no-header $(ARGS) --output-file requirements.lock pyproject.toml

.venv/ready: requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

# A separate target, because `make test` does not need it, and it unpacks twelve thousand icons.
.venv/docs: .venv/ready
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[docs]'
	@touch $@

.venv-bench/ready: requirements.lock pyproject.toml benchmarks/requirements.txt
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/pip install --quiet --disable-pip-version-check -r benchmarks/requirements.txt
	.venv-bench/bin/pip install --quiet --disable-pip-version-check --editable '.[documents]'
	@touch $@

clean: ## Remove environments, caches and build results
	rm -rf build .venv .venv-bench .venv-lock .venv-models .mypy_cache .ruff_cache .pytest_cache .hypothesis
