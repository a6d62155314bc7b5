# make run: the main job on the bundled models. make test: lint and tests. Both create .venv when needed.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
STAMP := .venv/installed

# What every experiment says of the bundled models, as docs/results.md.
.PHONY: run results test test-full test-remote test-remote-full lint clean

run: $(STAMP)
	$(BIN)/encode-address find --model tiny-gdn --model tiny-mamba2 --out results

results: $(STAMP)
	$(BIN)/encode-address paper results --model tiny-gdn --model tiny-mamba2
	for command in transfer replace; do \
		$(BIN)/encode-address $$command --donor tiny-gdn --host tiny-mamba2 && \
		$(BIN)/encode-address $$command --donor tiny-mamba2 --host tiny-gdn || exit; done
	$(BIN)/encode-address paper results
	cp results/results.md docs/results.md

test: $(STAMP) lint
	$(BIN)/pytest -m "not full and not ndif" --numprocesses 2 --dist loadfile --durations=10

test-full: $(STAMP) lint
	$(BIN)/pytest -m "not ndif" --durations=20
	$(BIN)/python benchmarks/sweep.py --quick

# The tests that need a real NDIF server; it is installed into .venv-ndif, started and stopped here. Needs root.
test-remote: $(STAMP)
	$(BIN)/python -m tests.remote -m "ndif and not ndif_full" --durations=10

test-remote-full: $(STAMP)
	$(BIN)/python -m tests.remote -m ndif --durations=20

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $(STAMP)

clean:
	rm -rf .venv .venv-ndif results build *.egg-info
