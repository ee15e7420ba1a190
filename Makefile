# make demo: sets up and runs the tour.   make test: sets up and passes the tests.
# Both make their own .venv and need only Python 3.11+, a C++20 compiler and cmake.
#
# Besides, and no part of `make test` but for the first:
#   make native-test   the native parts by themselves
#   make odr           that no two types of the native modules share a name
#   make sanitize      native and Python tests under address, undefined and thread sanitizers
#   make conformance   PyTorch's own distributed suite on the backend "weft"
#   make chaos         a rank is killed, stopped and interrupted at every point of a call
#   make fuzz          10,000 cases of everything that parses
#   make wheel-check   a wheel, installed and used in a new environment without a compiler
#   make docs          the documents as a site, in build/site

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NATIVE := $(filter-out native/tests/% native/loom/%, $(wildcard native/*.* native/*/*.cpp native/*/*.h native/*/*.inc))

.PHONY: demo test check setup clean native-test odr sanitize conformance chaos fuzz wheel-check docs

demo: setup
	$(BIN)/weft demo

# Half of the time tests wait for each other's ranks, links and deadlines: two of them at a time.
test: check
	$(BIN)/python -m pytest -n 2 --dist worksteal

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "weft needs Python 3.11 or newer; run: make PYTHON=python3.11"; exit 1; }
	@command -v $${CXX:-c++} >/dev/null 2>&1 || \
	  { echo "weft needs a C++20 compiler and found none; on Debian: apt-get install g++"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV) (the first time takes a few minutes)"
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

native-test:
	@cmake -S native -B build/native-tests -DWEFT_MODULES=OFF -DWEFT_TESTS=ON -DWEFT_ODR=ON >/dev/null
	@cmake --build build/native-tests --parallel 2 --target native_tests loom_tests >/dev/null
	@build/native-tests/native_tests
	@build/native-tests/loom_tests

odr: setup
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target build/odr/site \
	  -C cmake.define.WEFT_ODR=ON -C build-dir=build/odr/module .
	@echo "no two types or functions of the native modules share a name"

sanitize: setup
	@$(BIN)/python tests/sanitizers/run.py

conformance: setup
	@$(BIN)/pip install --quiet --disable-pip-version-check --upgrade --target build/conformance/site \
	  expecttest
	@PYTHONPATH=build/conformance/site $(BIN)/python -m pytest -rs tests/conformance/torch_distributed.py

chaos: setup
	@WEFT_CHAOS=all $(BIN)/python -m pytest -n 2 tests/chaos

fuzz: setup
	@WEFT_FUZZ=nightly $(BIN)/python -m pytest -vv -n 2 tests/fuzz

wheel-check: setup
	@$(BIN)/python tests/packaging/check_wheel.py

docs: setup
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt $$($(BIN)/python -c \
	  'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "wrote build/site/index.html"

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
