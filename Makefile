# Everything a developer types. Needs Python 3.11 with venv, and make; the rest is installed into .venv.
PYTHON ?= python3
BIN := .venv/bin
# The suite starts a thousand processes; where this is set, each of them would compile Batchwright anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: bench bench-batch bench-idle bench-ingest bench-lists bench-plan bench-queue bench-scale bench-thousand chaos \
	chaos-batches chaos-crowd chaos-documents chaos-failover chaos-hosts chaos-queue chaos-tasks clean collect demo \
	docs lint lock prices test test-external test-models test-perturbed test-postgres16 test-thorough

demo: .venv/ready
	@$(BIN)/batchwright demo
	@$(BIN)/batchwright demo --documents

test: .venv/ready
	@$(MAKE) --no-print-directory --jobs 2 lint collect
	$(BIN)/pytest -n 4 --dist loadgroup

# What pytest makes of the tests before it runs them: once here, and not once in each of its processes.
collect: .venv/ready
	@$(BIN)/pytest --collect-only --quiet --quiet > /dev/null

lint: .venv/ready
	@! grep -rniI 'w[i]ndlass' --exclude=CHANGELOG.md --exclude-dir=.git --exclude-dir='.venv*' --exclude-dir='.*_cache' \
		--exclude-dir=.hypothesis --exclude-dir=__pycache__ . || { echo 'lint: this is the old name of Batchwright'; exit 1; }
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache

# Other servers repeat what sends statements, without what goes through commands and programs.
ABOVE_STATEMENTS := $(addprefix --ignore tests/,\
	batches/commands chaos cli demo examples ingest/commands providers/commands)
test-postgres16: .venv/ready
	BATCHWRIGHT_TEST_POSTGRES_MAJOR=16 $(BIN)/pytest -n 4 --dist loadgroup $(ABOVE_STATEMENTS)

# What `make test` shows on one provider, on the others; and what takes long.
test-thorough: .venv/ready
	BATCHWRIGHT_TEST_THOROUGH=1 $(BIN)/pytest -n 4 --dist loadgroup -m thorough

# The server that BATCHWRIGHT_TEST_DATABASE_URL names, without the embedded one, which `make test` has covered.
test-external: .venv/ready
	BATCHWRIGHT_TEST_SERVERS=external $(BIN)/pytest -n 3 --dist loadgroup $(ABOVE_STATEMENTS)

# Every statement and every call delayed at random, on changing seeds, until MINUTES are over or something fails.
test-perturbed: .venv/ready
	$(BIN)/python -m tests.perturbed.run --minutes $(or $(MINUTES),30) $(addprefix --seed ,$(SEED)) $(ARGS)

# Whole batches on real model servers. What cannot be built here is skipped, and says why.
test-models: .venv/ready
	test -e .venv-models/ready || { sh tests/models/build.sh && touch .venv-models/ready; } || true
	BATCHWRIGHT_TEST_MODELS=1 $(BIN)/pytest -rs tests/models

chaos: chaos-queue chaos-batches chaos-crowd chaos-documents chaos-failover chaos-tasks

chaos-batches: .venv/ready
	$(BIN)/python -m tests.chaos.batches $(ARGS)

chaos-crowd: .venv/ready
	$(BIN)/python -m tests.chaos.crowd $(ARGS)

chaos-documents: .venv/ready
	$(BIN)/python -m tests.chaos.documents $(ARGS)

chaos-failover: .venv/ready
	$(BIN)/python -m tests.chaos.failover $(ARGS)

# Two hosts in network namespaces, of which one is cut off; needs root and `ip`, so `make chaos` leaves it out.
chaos-hosts: .venv/ready
	$(BIN)/python -m tests.chaos.hosts $(ARGS)

chaos-queue: .venv/ready
	$(BIN)/python -m tests.chaos.queue $(ARGS)

chaos-tasks: .venv/ready
	$(BIN)/python -m tests.chaos.tasks $(ARGS)

bench: bench-batch bench-idle bench-ingest bench-lists bench-plan bench-queue bench-scale bench-thousand

bench-batch: .venv-bench/ready
	.venv-bench/bin/python -m benchmarks.batch $(ARGS)

bench-idle: .venv-bench/ready
	.venv-bench/bin/python -m benchmarks.idle $(ARGS)

bench-ingest: .venv-bench/ready
	.venv-bench/bin/python -m benchmarks.ingest $(ARGS)

bench-lists: .venv-bench/ready
	.venv-bench/bin/python -m benchmarks.lists $(ARGS)

bench-plan: .venv/ready
	$(BIN)/python -m benchmarks.plan $(ARGS)

bench-queue: .venv-bench/ready
	.venv-bench/bin/python -m benchmarks.queue $(ARGS)

bench-scale: .venv-bench/ready
	.venv-bench/bin/python -m benchmarks.scale $(ARGS)

bench-thousand: .venv-bench/ready
	.venv-bench/bin/python -m benchmarks.thousand $(ARGS)

docs: .venv/ready
	$(BIN)/python docs/generate.py

# The lists of prices, from the newest litellm that the package index has.
prices: .venv/ready
	$(BIN)/python tools/prices.py $(ARGS)

lock: .venv/ready
	$(BIN)/pip install --quiet pip-tools
	$(BIN)/pip-compile --quiet --extra dev --strip-extras --no-emit-index-url --no-emit-trusted-host \
		--no-emit-find-links --no-annotate --no-header --upgrade --output-file requirements.lock pyproject.toml

.venv/ready: requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

.venv-bench/ready: requirements.lock pyproject.toml benchmarks/requirements.txt
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/pip install --quiet --disable-pip-version-check -r benchmarks/requirements.txt
	.venv-bench/bin/pip install --quiet --disable-pip-version-check --editable '.[documents]'
	@touch $@

clean:
	rm -rf .venv .venv-bench .venv-models .mypy_cache .ruff_cache .pytest_cache .hypothesis
