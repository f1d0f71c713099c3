# Two commands are enough: `make demo` and `make test`. Each sets up what it needs and skips that the next time.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
CORE := $(VENV)/.core
READY := $(VENV)/.ready
OLDEST := .venv-oldest

.PHONY: help demo test test-full lint bench bench-gpu evidence docs gallery release wheel oldest clean
help:  ## what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | sort

$(CORE): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "visattn: error: $(PYTHON) not found; install Python 3.11 or run: make $(MAKECMDGOALS) PYTHON=python3" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@$(BIN)/python scripts/install.py -e .
	@touch $@

$(READY): $(CORE)  # what tests, docs and benchmarks need beside
	@$(BIN)/python scripts/install.py -e ".[dev]"
	@touch $@

demo: $(CORE)  ## look at four photos through DINOv2; pictures in out/demo
	$(BIN)/visattn demo --output out/demo --overwrite

lint: $(READY)  ## style, types, import contract, shape of the package, words
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/structure.py
	$(BIN)/python scripts/words.py

test test-full: export PYTHONDONTWRITEBYTECODE :=  # else every process compiles all files anew
test: lint  ## what a change can break: style, types, import contract, tests
	$(BIN)/python -c "from visattn.data import offline_weights; print('weights:', offline_weights(), offline_weights('tf_efficientnet_lite0'))"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not full and not evidence"

test-full: $(READY)  ## what takes long: real trainings, kills, packaging, every operation, the recipes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist load -m "full and not evidence" tests/training/test_resume.py  # forks: no autograd thread may have run before
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal -m "full and not evidence" --ignore tests/training/test_resume.py

bench: $(READY)  ## speed and memory against the plain forward and against peers, and start-up; BENCH=--write-docs puts them into the docs
	$(BIN)/python scripts/benchmark.py $(BENCH)
	$(BIN)/python scripts/startup.py

bench-gpu: $(READY)  ## exactness and speed on a GPU
	$(BIN)/python scripts/bench_gpu.py

evidence: $(READY)  ## the heavier proofs; those whose result is kept for this tree are not run again
	$(BIN)/python scripts/proofs.py

docs: $(READY)  ## the site in build/site; open index.html, no server is needed
	$(BIN)/python scripts/website/live.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

gallery: $(READY)  ## rebuild the pictures of README and docs
	$(BIN)/python scripts/make_gallery.py

release: $(READY)  ## build wheels and source distributions, and try them everywhere; RELEASE=--draft without a tag
	$(BIN)/python scripts/release.py $(RELEASE)

wheel: $(READY)  ## the wheel in a new environment
	$(BIN)/python scripts/wheel.py

$(OLDEST)/.ready: pyproject.toml
	$(PYTHON) -m venv --clear $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet uv  # pip takes too long to find versions that fit together
	$(OLDEST)/bin/python scripts/oldest.py $(OLDEST)/bin/uv > $(OLDEST)/versions.txt
	$(OLDEST)/bin/uv pip install --quiet --python $(OLDEST)/bin/python -e ".[dev]" --constraint $(OLDEST)/versions.txt
	@touch $@

oldest: $(OLDEST)/.ready  ## the quick tests with the oldest versions that visattn allows, in an environment of their own
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -q -n 2 --dist worksteal -m "not full and not evidence" -W ignore::DeprecationWarning -W ignore::PendingDeprecationWarning

clean:  ## remove what was built
	rm -rf $(VENV) $(OLDEST) out build dist .pytest_cache .mypy_cache .ruff_cache .bench visattn.egg-info
