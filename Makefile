# `make demo` and `make test` do all their set-up on a fresh machine (Python >= 3.11 and internet access to PyPI).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_WAIT_POLICY := PASSIVE
# The tests start many processes, which would all compile medseg anew.
unexport PYTHONDONTWRITEBYTECODE
# One thread per worker: more would wait for each other. Neighbours share a worker, and with it their fixtures.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: help setup demo lint test test-slow test-thorough test-all attack matrix docs gpu clean

help:            ## list the targets
	@grep -E '^[a-z-]+: .*##|^[a-z-]+:  *##' $(MAKEFILE_LIST) | sed -E 's/:.*## */\t/' | expand -t 14

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,docs,export,loggers,openvino,optimizers,ray,search,sweep]"
	# Its U-Nets need torch alone; what it requires beyond is for other networks.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps dynamic_network_architectures
	touch $@

setup: $(VENV)/.ready   ## make .venv with the tested versions

demo: setup      ## phantom scans -> train coarse and fine -> predict -> scores and pictures under demo/
	$(BIN)/medseg demo output=demo

lint: setup      ## ruff, mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint       ## the default tests (no GPU, no network, no data beside the repository)
	$(PYTEST) -m "not slow and not gpu"

test-slow: setup ## only the slow tests: training to a score, two ranks, the wheel, the commands of the README
	$(PYTEST) -m "slow and not gpu and not attack and not thorough" --durations=15

test-thorough: setup   ## only what the CI leaves out: the laws of other tests on many more inputs
	$(PYTEST) -m "thorough and not gpu and not attack" --durations=15

attack: setup    ## hostile files, kills, signals, races and full disks (about an hour)
	$(PYTEST) -m attack --durations=15

test-all: test test-slow test-thorough   ## all three

matrix: setup    ## every pair of network, stage, loss, switch and ranks in small trainings -> docs/matrix.md
	$(BIN)/python tests/matrix/matrix.py docs/matrix.md

docs: setup      ## the documentation site -> site/index.html; with search: python -m http.server -d site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

gpu: setup       ## on a machine with an NVIDIA GPU (without one: REHEARSAL=1): tests, memory, training, prediction -> gpu/gpu.md
	$(BIN)/python -m benchmarks.gpu gpu

clean:           ## remove what the targets made (runs/ and data/ stay)
	rm -rf $(VENV) demo build dist site .pytest_cache .mypy_cache .ruff_cache
