# make setup   the virtual environment with pinned versions (PYTHON=python3.12 picks the interpreter)
# make demo    injected faults found, and a corrupted job brought back; on GPUs if there are any
# make test    everything but the campaigns     make campaign   the campaigns
# make lint    ruff and mypy                    make bench      healthy-path cost
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.stamp
PIP := $(PY) -m pip --disable-pip-version-check --no-input

# Ranks share the cores: one thread each.
export OMP_NUM_THREADS := 1

.PHONY: setup demo test lint campaign bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "$(PYTHON) is older than Python 3.10; name a newer one: make setup PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "$(PYTHON) has no venv module; on Debian or Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt torch
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(STAMP)
	$(PY) -m scout_core.demo
	$(PY) -m scout_core.demo.loop

test: $(STAMP)
	$(PY) -m pytest -q

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m mypy

campaign: $(STAMP)
	$(PY) -m pytest -q -m slow

bench: $(STAMP)
	$(PY) -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.healthy_path
	$(PY) -m benchmarks.signature_speed

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
