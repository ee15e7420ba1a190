# make demo: sets up and runs the tour.   make test: sets up and passes the tests.
# Both make their own .venv and need only Python 3.11+, a C++20 compiler and cmake.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NATIVE := $(wildcard native/*.cpp native/*.h) native/CMakeLists.txt

.PHONY: demo test check setup clean

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

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
