# One command each: `make serve`, `make test`, `make check`, `make bench`.
# Everything is installed into .venv of this folder; VENV=path uses another environment.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
SOURCES := $(shell find csrc -type f)
ARGS ?=

.PHONY: serve test check lint build bench train clean

serve: $(VENV)/.installed  ## install what is needed and start the server
	$(BIN)/bishop serve $(ARGS)

test: $(VENV)/.installed-test  ## the test suite, the contracts of the rooms included
	$(BIN)/python -m pytest $(ARGS)

check: lint test  ## everything that must hold before a change lands

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.installed  ## measure this machine's CPU kernels
	$(BIN)/python -m benchmarks.kernels_cpu $(ARGS)

train: $(VENV)/.installed  ## rebuild assets/mini from npm packages: needs npm and one GPU, 25 minutes
	$(PIP) --no-build-isolation -e '.[train]'
	$(BIN)/python -m training.train prepare
	$(BIN)/python -m training.train fit $(ARGS)
	$(BIN)/python -m training.train export

build: $(VENV)/.torch  ## compile sparse_attn._C alone and say what was built
	$(BIN)/python setup.py --quiet build_ext --inplace
	$(BIN)/python -c "import torch; from sparse_attn import _C; print(_C.cpu, _C.cuda, sep='; ')"

# torch first: the extension is compiled against the one installed, and no second one is fetched.
$(VENV)/.torch: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) setuptools wheel ninja torch numpy
	touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml setup.py $(SOURCES)
	$(PIP) --no-build-isolation -e .
	$(BIN)/python -c "from sparse_attn import ops; print('sparse_attn._C:', ops.built())"
	touch $@

$(VENV)/.installed-test: $(VENV)/.torch pyproject.toml setup.py $(SOURCES)
	$(PIP) --no-build-isolation -e '.[test]'
	$(BIN)/python -c "from sparse_attn import ops; print('sparse_attn._C:', ops.built())"
	touch $@ $(VENV)/.installed

clean:  ## remove what was built, not the environment
	rm -rf build *.egg-info sparse_attn/_C*.so
