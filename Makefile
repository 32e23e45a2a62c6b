# Two commands do everything on a fresh machine with Python 3.11 or newer: `make demo` and `make test`.
# Both build .venv first; it is rebuilt only when pyproject.toml or constraints.txt change.
#
#   PYTHON=python3.12       the interpreter .venv is made from
#   MODEL=gemma-3-270m      what `make demo` runs (default: the tiny model in this repository)
#   PYTEST_ARGS="-k pool"   replaces the default arguments of pytest
#   ARGS="--gemma"          further arguments of `make bench-engine`
#   TORCH_ARGS="..."        extra arguments of pip for torch alone, e.g. an index of CPU builds

PYTHON      ?= python3
MODEL       ?=
PYTEST_ARGS ?= -q -n auto --dist worksteal
TORCH_ARGS  ?=

VENV := .venv
BIN  := $(VENV)/bin
PIP  := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-input -c constraints.txt

.DELETE_ON_ERROR:
.PHONY: help demo test test-all check format docs-models bench bench-engine bench-ops clean

help:
	@echo "make demo      a hybrid model continues one long text eight times from one pool (MODEL=gemma-3-270m)"
	@echo "make test      every test but the slow ones;  make test-all: those too"
	@echo "make check     ruff, mypy, import ranks;      make format: let ruff rewrite"
	@echo "make docs-models  the table of docs/models.md, from the families"
	@echo "make bench     what the manager costs per call"
	@echo "make bench-engine   the engine against generate;  make bench-ops: single operations"
	@echo "make clean     remove .venv and caches"

demo: $(VENV)/installed $(if $(filter gemma-%,$(MODEL)),$(VENV)/installed-gguf)
	$(BIN)/python benchmarks/demo.py $(if $(MODEL),--model $(MODEL))

test: $(VENV)/installed
	$(BIN)/python -m pytest -m "not slow" $(PYTEST_ARGS)

test-all: $(VENV)/installed $(VENV)/installed-gguf
	$(BIN)/python -m pytest $(PYTEST_ARGS)

check: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs-models: $(VENV)/installed
	$(BIN)/python -m hybridkv_models docs/models.md

bench: $(VENV)/installed
	$(BIN)/python benchmarks/bench_manager.py

bench-engine: $(VENV)/installed
	$(BIN)/python benchmarks/bench_engine.py $(ARGS)

bench-ops: $(VENV)/installed
	$(BIN)/python benchmarks/bench_ops.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and alone. What pip would bring with it is looked at before anything is downloaded: a build with
# CUDA is several GB that nothing here uses.
define REFUSE_CUDA
import json, sys
names = [item["metadata"]["name"] for item in json.load(sys.stdin)["install"]]
cuda = [name for name in names if name.startswith(("nvidia-", "cuda-")) or name == "triton"]
if cuda:
    sys.exit(f"pip would install a CUDA build of torch ({', '.join(cuda[:3])}, ...). Name the index of CPU builds "
             "that PyTorch's install page gives: make TORCH_ARGS='--index-url URL' ...")
endef
export REFUSE_CUDA

$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("hybridkv needs Python 3.11 or newer; try PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) ..."
	@$(BIN)/python -c "import torch" 2>/dev/null || { \
	    $(PIP) $(TORCH_ARGS) --dry-run --report $(VENV)/torch.json torch && \
	    $(BIN)/python -c "$$REFUSE_CUDA" < $(VENV)/torch.json && \
	    $(PIP) $(TORCH_ARGS) torch; }
	@$(PIP) setuptools
	@$(PIP) --no-build-isolation -e '.[dev]'
	@mkdir -p $(VENV)/typing && ln -sfn ../../models $(VENV)/typing/hybridkv_models
	@$(BIN)/python -c 'from importlib.metadata import version as v; print("ready:", *(f"{n} {v(n)}" for n in ("hybridkv", "torch", "transformers", "numpy")))'
	@touch $@

$(VENV)/installed-gguf: $(VENV)/installed
	@echo "installing what GGUF models need ..."
	@$(PIP) --no-build-isolation -e '.[gguf]'
	@touch $@
