# Everything a developer types. Needs Python 3.11 with venv, and make; the rest is installed into .venv.
PYTHON ?= python3
BIN := .venv/bin
# The suite starts a thousand processes; where this is set, each of them would compile Batchwright anew.
unexport PYTHONDONTWRITEBYTECODE

# `make help` prints the targets that have a text behind `##`, under the headings that stand alone in `##@` lines.
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

# `make demo ARGS=--keep` stays up, with its dashboard to be looked at.
demo: .venv/ready ## Run the demos: a batch and documents, with a killed worker
	@$(BIN)/batchwright demo $(ARGS)
	@$(if $(ARGS),,$(BIN)/batchwright demo --documents)

##@ Test
test: .venv/ready ## Run everything that continuous integration runs
	@$(MAKE) --no-print-directory --jobs 2 lint collect
	$(BIN)/pytest -n 4 --dist loadgroup

# What pytest makes of the tests before it runs them: once here, and not once in each of its processes.
collect: .venv/ready
	@$(BIN)/pytest --collect-only --quiet --quiet > /dev/null

lint: .venv/ready ## Run ruff, mypy and the import contracts
	@! grep -rniI 'w[i]ndlass' --exclude=CHANGELOG.md --exclude-dir=.git --exclude-dir='.venv*' --exclude-dir='.*_cache' --exclude-dir=build \
		--exclude-dir=.hypothesis --exclude-dir=__pycache__ . || { echo 'lint: this is the old name of Batchwright'; exit 1; }
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache

# Other servers repeat what sends statements, without what goes through commands and programs or needs no database.
ABOVE_STATEMENTS := $(addprefix --ignore tests/,\
	batches/commands batches/test_pages.py chaos cli conformance demo examples inference ingest/commands \
	ingest/test_pages.py perturbed providers/commands providers/test_pages.py siege simulator storage telemetry \
	test_private.py web/test_browser.py)
test-postgres16: .venv/ready ## Run the tests of statements on PostgreSQL 16
	BATCHWRIGHT_TEST_POSTGRES_MAJOR=16 $(BIN)/pytest -n 4 --dist loadgroup tests/access tests/db tests/engine tests/upgrade \
		tests/test_list_plans.py tests/test_states.py

# What `make test` shows on one provider, on the others; and what takes long. Chaos has the machine to itself: its workers
# must keep their leases, and requests that it counts are sent again when one is late.
test-thorough: .venv/ready ## Run the long tests, and those of every provider
	BATCHWRIGHT_TEST_THOROUGH=1 $(BIN)/pytest -n 4 --dist loadgroup -m 'thorough and not chaos'
	BATCHWRIGHT_TEST_THOROUGH=1 $(BIN)/pytest -m 'thorough and chaos'

# The server that BATCHWRIGHT_TEST_DATABASE_URL names, without the embedded one, which `make test` has covered.
test-external: .venv/ready ## Run the tests on the server of BATCHWRIGHT_TEST_DATABASE_URL
	BATCHWRIGHT_TEST_SERVERS=external $(BIN)/pytest -n 3 --dist loadgroup $(ABOVE_STATEMENTS)

# Every statement and every call delayed at random, on changing seeds, until MINUTES are over or something fails.
test-perturbed: .venv/ready ## Delay every statement and call at random; MINUTES=30 SEED=7
	$(BIN)/python -m tests.perturbed.run --minutes $(or $(MINUTES),30) $(addprefix --seed ,$(SEED)) $(ARGS)

# Whole batches on real model servers. What cannot be built here is skipped, and says why.
test-models: .venv/ready ## Run whole batches on real model servers; builds them first
	test -e .venv-models/ready || { sh tests/models/build.sh && touch .venv-models/ready; } || true
	BATCHWRIGHT_TEST_MODELS=1 $(BIN)/pytest -rs tests/models

##@ Kill and break
chaos: chaos-queue chaos-batches chaos-crowd chaos-documents chaos-failover chaos-tasks ## Run all kill tests but chaos-hosts

chaos-batches: .venv/ready ## Kill workers of a large batch
	$(BIN)/python -m tests.chaos.batches $(ARGS)

chaos-crowd: .venv/ready ## Send 1,000 small batches through slow workers
	$(BIN)/python -m tests.chaos.crowd $(ARGS)

chaos-documents: .venv/ready ## Kill workers of documents
	$(BIN)/python -m tests.chaos.documents $(ARGS)

chaos-failover: .venv/ready ## Fail over the database for half an hour
	$(BIN)/python -m tests.chaos.failover $(ARGS)

# Two hosts in network namespaces, of which one is cut off; needs root and `ip`, so `make chaos` leaves it out.
chaos-hosts: .venv/ready ## Cut off one of two hosts; needs root and ip
	$(BIN)/python -m tests.chaos.hosts $(ARGS)

chaos-queue: .venv/ready ## Kill workers of a queue
	$(BIN)/python -m tests.chaos.queue $(ARGS)

chaos-tasks: .venv/ready ## Kill workers of tasks
	$(BIN)/python -m tests.chaos.tasks $(ARGS)

siege: .venv/ready ## Attack the HTTP server in every way at once, beside an honest client
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

# The lists of prices, from the newest litellm that the package index has.
prices: .venv/ready ## Update the lists of prices
	$(BIN)/python tools/prices.py $(ARGS)

# Pinned versions stay; `make lock ARGS=--upgrade` takes the newest. Every file of every version has its hash.
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

# Apart from the rest, because `make test` can do without it: it has twelve thousand icons to unpack.
.venv/docs: .venv/ready
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[docs]'
	@touch $@

.venv-bench/ready: requirements.lock pyproject.toml benchmarks/requirements.txt
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/pip install --quiet --disable-pip-version-check -r benchmarks/requirements.txt
	.venv-bench/bin/pip install --quiet --disable-pip-version-check --editable '.[documents]'
	@touch $@

clean: ## Remove environments, caches and what was built
	rm -rf build .venv .venv-bench .venv-lock .venv-models .mypy_cache .ruff_cache .pytest_cache .hypothesis
