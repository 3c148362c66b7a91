# Commands for using and working on Meshwright; `make help` lists them.
#
# An active virtual environment is used as it is, and what is missing there is installed. Without one, `.venv` is made
# here the first time. After that nothing is downloaded.

# The PyTorch a new environment gets. Where pip would bring a CUDA build and there is no GPU, name a CPU wheel:
#   make test TORCH=path/to/torch-2.13.0+cpu-....whl
TORCH = torch==2.13.0
# More arguments for the command: make test ARGS='-k strategy', make train ARGS='--set job.global_batch=16'
ARGS =

ifeq ($(strip $(VIRTUAL_ENV)),)
  BIN = .venv/bin
  READY = .venv/.ready
  # An environment holds absolute paths: one whose folder was moved or copied is made anew.
  ifneq ($(shell cat .venv/.ready 2>/dev/null),$(CURDIR))
    .PHONY: .venv/.ready
  endif
else
  BIN = $(VIRTUAL_ENV)/bin
  READY = active-environment
endif

.DEFAULT_GOAL = help
.PHONY: help train test test-all check bench accuracy models gpu-check active-environment

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile

train: $(READY) ## plan for this machine and train a small language model on it
	"$(BIN)/meshwright" train $(ARGS)

test: $(READY) ## the tests, without the slow ones
	"$(BIN)/python" -m pytest -m "not slow" $(ARGS)

test-all: $(READY) ## all tests: the whole lattice of strategies
	"$(BIN)/python" -m pytest $(ARGS)

check: $(READY) ## style, types, floors, spelling
	"$(BIN)/python" -m ruff check .
	"$(BIN)/python" -m ruff format --check .
	"$(BIN)/python" -m mypy
	"$(BIN)/lint-imports"
	"$(BIN)/codespell"

bench: $(READY) ## how long commands take to start, and schedules to be made
	"$(BIN)/python" bench/startup.py $(ARGS)
	"$(BIN)/python" bench/schedule.py

accuracy: $(READY) ## predicted beside published: writes docs/accuracy.md
	"$(BIN)/python" scripts/accuracy.py $(ARGS)

models: $(READY) ## verify Hugging Face families under every ZeRO stage: writes docs/models.md
	"$(BIN)/python" scripts/models.py $(ARGS)

gpu-check: $(READY) ## prove on a GPU machine what CPUs cannot
	"$(BIN)/python" scripts/gpu_check.py $(ARGS)

.venv/.ready: pyproject.toml scripts/environment.py
	@command -v python3 >/dev/null || { echo "python3 is not on PATH. Meshwright needs Python 3.11 or newer."; exit 1; }
	@python3 scripts/environment.py --create .venv --torch '$(TORCH)'
	@printf '%s\n' '$(CURDIR)' >$@

active-environment:
	@test -x "$(BIN)/python" || { echo "The active environment $(VIRTUAL_ENV) has no Python. Deactivate it, or make it again."; exit 1; }
	@"$(BIN)/python" scripts/environment.py --torch '$(TORCH)'
