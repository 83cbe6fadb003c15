# `make demo` and `make test` include the set-up on a machine with Python 3.10-3.13.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
DEMO_DIR ?= outputs/demo/$(shell date +%Y-%m-%d_%H-%M-%S)
comma := ,

# One thread per process: two processes with two threads each collapse on two cores.
export OMP_NUM_THREADS ?= 1
# The tests start hundreds of interpreters, which would compile hundreds of modules each.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all tests/slow_tests.txt test-oldest test-learning test-third-party test-peers check lint types imports format docs docs-links bench wheel clean help

help:  ## List the targets.
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

# pip compiles 280 MB of Python sequentially, which takes a minute. Python compiles imported modules when needed; for the
# tests most of them are compiled beforehand: torch while pip, which uses one core, installs the rest, the others after it
# on all cores.
INSTALL := $(PIP) install --quiet --no-compile -c constraints.txt
RARELY_IMPORTED := tests?|testing|examples|_inductor|mypyc?|plotly|ray|sklearn|pip|setuptools|debugpy|databricks|lexers|transformers|physics|genai
COMPILE := $(BIN)/python -W ignore -m compileall -qq -x '[/\\]($(RARELY_IMPORTED))[/\\]'
INSTALL_AND_COMPILE = $(COMPILE) $(VENV)/lib & $(INSTALL) -e ".[$(1)]"; status=$$?; wait; \
	$(COMPILE) -j 0 $(VENV)/lib maze maze_envs tutorials; exit $$status

# torch goes first and alone: resolved together with the rest, pip may prefer a build with gigabytes of CUDA packages.
$(VENV)/.torch: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) torch
	touch $@

$(VENV)/.runtime: $(VENV)/.torch
	$(INSTALL) -e ".[train]"
	touch $@

# Not after `.runtime`: everything is resolved and built once.
$(VENV)/.dev: $(VENV)/.torch
	$(call INSTALL_AND_COMPILE,dev$(comma)graph)
	touch $(VENV)/.runtime $@

# Ray, trackers and the browser driver are as large as everything else.
$(VENV)/.dev-all: $(VENV)/.torch
	$(call INSTALL_AND_COMPILE,dev-all)
	touch $(VENV)/.runtime $(VENV)/.dev $@

# The site needs the dependencies of Maze only; optional packages such as Ray are mocked.
$(VENV)/.docs: $(VENV)/.torch
	$(INSTALL) -e ".[docs]"
	touch $(VENV)/.runtime $@

demo: $(VENV)/.runtime  ## Train PPO on CartPole-v1 for about a minute, roll the policy out, print statistics.
	$(BIN)/maze-run -cn conf_train +experiment=cartpole_ppo hydra.run.dir=$(DEMO_DIR)/training
	$(BIN)/maze-run env.name=CartPole-v1 policy=torch_policy input_dir=$(DEMO_DIR)/training runner.n_processes=2 \
		runner.max_episode_steps=500 hydra.run.dir=$(DEMO_DIR)/rollouts

test: $(VENV)/.dev  ## Run the fast tests.
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not learning and not long and not slow"

test-all: $(VENV)/.dev-all  ## Run all tests, including those that are slow or need Ray.
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not learning"

tests/slow_tests.txt: $(VENV)/.dev-all  ## Measure all tests, and list the slow ones, which `make test` leaves out.
	mkdir -p build; $(BIN)/python -m pytest -n 2 --dist worksteal -m "not learning" -vv --durations=0 > build/durations.txt; \
	$(BIN)/python tests/slow_tests.py build/durations.txt > $@

test-oldest:  ## Run the tests with the oldest supported versions of torch and gymnasium (installs gigabytes).
	test -x $(VENV)-oldest/bin/python || $(PYTHON) -m venv $(VENV)-oldest
	$(VENV)-oldest/bin/python -m pip install --quiet -c constraints-oldest.txt -e ".[dev,graph]"
	$(VENV)-oldest/bin/python -m pytest -n 2 --dist worksteal -m "not learning"

test-learning: $(VENV)/.dev  ## Train until the stated returns are reached (minutes).
	$(BIN)/python -m pytest -m learning

test-third-party: $(VENV)/.dev  ## Install environments of other packages and train in each of them.
	$(PIP) install --quiet -c constraints.txt -e ".[thirdparty]"
	$(BIN)/python -m pytest tests/interop/test_third_party.py

# Their requirements exclude those of Maze (job-shop-lib an older pyarrow, stockpyl documentation tools): without them,
# in a directory of their own, they run with the installed versions.
PEERS := job-shop-lib==1.7.2 simanneal==0.5.0 stockpyl==1.0.2 jsonpickle==4.1.4 rliable==1.2.0 arch==7.2.0 \
	statsmodels==0.15.0 patsy==1.0.3 formulaic==1.2.2 interface_meta==2.0.1 wrapt==2.5.2 seaborn==0.13.2

build/peers:
	$(PIP) install --quiet --no-deps --no-compile --target $@ $(PEERS)

test-peers: $(VENV)/.dev build/peers  ## Compare results with job-shop-lib, stockpyl and rliable.
	PYTHONPATH=build/peers $(BIN)/python -m pytest tests/interop/test_outside_checks.py

check: lint types imports  ## Everything but the tests.

lint: $(VENV)/.dev-all
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev-all
	$(BIN)/python -m mypy

imports: $(VENV)/.dev-all
	$(BIN)/lint-imports

format: $(VENV)/.dev  ## Format the code and fix what can be fixed.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Trees of documents are shared by both, so that notebooks are executed once.
SPHINX := $(BIN)/python -m sphinx --fail-on-warning --keep-going -j 2 -d build/docs/.trees

docs: $(VENV)/.docs  ## Build the documentation site in build/docs; warnings are errors.
	$(SPHINX) -b html docs build/docs
	@echo "open build/docs/index.html"

docs-links: $(VENV)/.docs  ## Check external links of the documentation (needs the network).
	$(SPHINX) -b linkcheck docs build/docs/links

bench: $(VENV)/.dev  ## Speed relative to other libraries (see benchmarks/README.md).
	$(BIN)/python benchmarks/env_layer.py --quick
	$(BIN)/python benchmarks/vector_env.py --quick
	$(BIN)/python benchmarks/training_speed.py --quick
	$(BIN)/python benchmarks/wrappers.py --quick

wheel:  ## Build dist/maze_rl-<version>-py3-none-any.whl, which installs Maze on another machine.
	$(PYTHON) -m pip wheel --quiet --no-deps -w dist .
	@ls dist/maze_rl-*.whl

clean:  ## Remove the environment and caches.
	rm -rf $(VENV) build/docs docs/generated .pytest_cache .mypy_cache .ruff_cache .hypothesis
