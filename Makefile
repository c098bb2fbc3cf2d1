# What the README tells users to run. Everything lives in .venv; versions are pinned in constraints.txt.
# `make PYTHON=/path/to/python3 ...` chooses the Python that .venv is made with.
PYTHON ?=
VENV := .venv
BIN := $(VENV)/bin
# $(call prepare,SET,STEPS): makes .venv, or mends it; quick if nothing is missing.
prepare = python=$$(infra/find_python.sh "$(PYTHON)") && "$$python" infra/environment.py $(1) $(2)

.PHONY: setup setup-dev demo test quick soak headline lint docs clean

setup:
	@$(call prepare,core,2)

setup-dev:
	@$(call prepare,dev,2)

demo:
	@$(call prepare,core,3)
	@echo "3/3 training a small model on your Python's own standard library"
	@$(BIN)/gregale train config/quickstart.yaml
	@$(BIN)/gregale report quickstart --output runs/quickstart/report.html

# Compiled programs are kept in .pytest_cache, so that a second call takes much less; --cache-clear forgets them.
SUITE := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

test: lint
	$(SUITE) --most-processor-minutes 40

quick: lint
	$(SUITE) -m "not slow"

# What takes an hour: many kills, many schedules of faults, a disturbed fleet. `make test` has a short form of each.
soak: setup-dev
	$(SUITE) -m soak -o faulthandler_timeout=7200
	$(BIN)/python -m benchmarks.faults --soak 20

# OpenDiLoCo's table at the size of a processor: one replica, eight with PSDP and with DiLoCo in ten minutes, then others.
headline: setup-dev
	$(BIN)/python -m benchmarks.losses runs/headline headline_8 --seeds 1

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

docs:
	@$(call prepare,docs,2)
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) site
