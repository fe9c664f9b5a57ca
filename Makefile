# `make demo` and `make test` set up all they need by themselves: see tests/environments.
# The cache folder is $DCR_CACHE, else dcr in the user's cache folder.

PYTHON ?= python3.11
DEMO_TP ?= 1

environments := tests/environments
setup := $(PYTHON) $(environments)/setup_environments.py

.DEFAULT_GOAL := help
.PHONY: help demo test lint build bench lock clean python

help:
	@echo "make demo [DEMO_TP=1|2]  five optimizer steps, each with a refit into a running vLLM server, compared bit for bit"
	@echo "make test                all checks and tests"
	@echo "make lint                rustfmt, clippy and ruff only"
	@echo "make build               the environments and dcr itself, without running anything"
	@echo "make bench               measure comparing, encoding and applying on this machine"
	@echo "make lock                resolve the environments' pins anew (tests/environments/*.in)"
	@echo "make clean               remove what the commands left in this checkout (the cache folder stays)"

demo: python
	@DEMO_TP=$(DEMO_TP) $(setup) --run tools -- python tests/demo.py

test: python
	@$(PYTHON) $(environments)/check_all.py

lint: python
	@$(PYTHON) $(environments)/check_all.py lint

build: python
	@$(setup)

bench: python
	@$(setup) --run training -- dcr bench construct --model testbed.bench_model:build
	@$(setup) --run tools -- cargo run --locked --release -p dcr-core --example speed

lock: python
	@$(PYTHON) $(environments)/relock.py

clean:
	rm -rf target build dist demo-out .pytest_cache .ruff_cache *.egg-info
	find rust tests vllm_plugin training_plugin -name __pycache__ -type d -prune -exec rm -rf {} +

# The set-up names every other program that is missing, and this one runs it.
python:
	@command -v $(PYTHON) >/dev/null || { \
		echo "dcr set-up: the program $(PYTHON) is not found; run 'apt install python3.11 python3.11-venv' or name one with 'make PYTHON=/path/to/python3.11'" >&2; \
		exit 1; }
