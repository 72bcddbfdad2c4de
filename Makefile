# Everything one does with scalax, each in one command; `make` alone lists them.
#
#   make train ARGS="--steps 100"     passes flags on
#   make PYTHON=/path/to/python3 ...  uses that interpreter instead of the newest one found

VENV := .venv
OLDEST := .venv-oldest
RELEASE := .venv-0.2.5
OTHERS := .venv-others
# What `make verify` runs all tests on, besides the newest; 0.10.2 is what is newest for Python 3.11.
VERIFY := 0.10.0 0.10.2 0.11.2
PY := $(VENV)/bin/python
ARGS :=

# How fast the machine code of a test is says nothing about scalax, and compiling it is much of the work of the tests.
# `make test-all` compiles as users do. JAX 0.10 can also do without MLIR; later releases do not know that flag.
SMALL := --xla_cpu_parallel_codegen_split_count=1
LIGHT := JAX_DISABLE_MOST_OPTIMIZATIONS=1 XLA_FLAGS='$(SMALL)'
LIGHT_OLDEST := JAX_DISABLE_MOST_OPTIMIZATIONS=1 XLA_FLAGS='$(SMALL) --xla_cpu_use_fusion_emitters=false'
FEWER := --hypothesis-profile=fewer

# The interpreter for the oldest supported JAX; where it is not given, the oldest one that fits.
PYTHON_OLDEST ?= $(PYTHON)

# A stamp says that an installation has finished. Its text is shown on every run (see below).
EXAMPLES_STAMP := $(VENV)/.installed-examples
PLAN_STAMP := $(VENV)/.installed-plan
DEV_STAMP := $(VENV)/.installed-dev
OLDEST_STAMP := $(OLDEST)/.installed
RELEASE_STAMP := $(RELEASE)/.installed
OTHERS_STAMP := $(OTHERS)/.installed
VERIFY_STAMPS := $(VERIFY:%=.venv-%/.installed)

# A stamp is worth nothing where the interpreter has gone, say with an upgrade of the system.
$(shell $(PY) -c '' 2>/dev/null || rm -f $(EXAMPLES_STAMP) $(PLAN_STAMP) $(DEV_STAMP))
$(shell $(OLDEST)/bin/python -c '' 2>/dev/null || rm -f $(OLDEST_STAMP))
$(shell $(RELEASE)/bin/python -c '' 2>/dev/null || rm -f $(RELEASE_STAMP))
$(shell $(OTHERS)/bin/python -c '' 2>/dev/null || rm -f $(OTHERS_STAMP))
$(foreach jax,$(VERIFY),$(shell .venv-$(jax)/bin/python -c '' 2>/dev/null || rm -f .venv-$(jax)/.installed))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Two installations of this folder at the same time would write the same build files.
.NOTPARALLEL:

.PHONY: help setup train train-distributed digits plan bench check test test-oldest test-all verify docs tutorial dist fuzz faults mutants clean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(DEV_STAMP) $(OLDEST_STAMP) ## make the environments of `make test-all`

train: $(EXAMPLES_STAMP) ## train a small language model on simulated devices (flags in ARGS)
	@cat $(EXAMPLES_STAMP)
	@$(PY) -m examples.llama.train $(ARGS)

train-distributed: $(EXAMPLES_STAMP) ## the same on two processes, saved as it goes; run it again to continue
	@cat $(EXAMPLES_STAMP)
	@$(PY) -m examples.launch.local --processes=2 --devices=2 -- -m examples.llama.train \
	  --output=runs/llama-distributed --checkpoints=runs/llama-distributed/checkpoints $(ARGS)

digits: $(EXAMPLES_STAMP) ## train on handwritten digits (flags in ARGS)
	@cat $(EXAMPLES_STAMP)
	@$(PY) -m examples.digits $(ARGS)

plan: $(PLAN_STAMP) ## plan LLaMA-3 on TPUs that are not here (flags in ARGS)
	@cat $(EXAMPLES_STAMP)
	@$(PY) -m examples.plan_llama $(ARGS)

bench: $(EXAMPLES_STAMP) $(if $(findstring --against,$(ARGS)),$(RELEASE_STAMP)) $(if $(findstring unchanged,$(ARGS))$(findstring auto_sharding,$(ARGS))$(findstring published,$(ARGS)),$(DEV_STAMP)) $(if $(findstring others,$(ARGS)),$(OTHERS_STAMP)) ## run the benchmarks (flags in ARGS)
	@cat $(EXAMPLES_STAMP)
	@$(if $(findstring others,$(ARGS)),$(OTHERS)/bin/python,$(PY)) -m benchmarks $(ARGS)

check: $(DEV_STAMP) ## format, lint, types, and the quick tests: before each commit
	@$(LIGHT) PYTEST_ARGS='-q -m "not slow and not medium" $(FEWER)' scripts/check.sh $(PY) format lint types tests

test: $(DEV_STAMP) ## format, lint, types, docstrings, and all tests but the slow ones, on the newest JAX
	@cat $(EXAMPLES_STAMP)
	@$(LIGHT) PYTEST_ARGS='-m "not slow" $(FEWER)' scripts/check.sh $(PY) format lint types docstrings tests

test-oldest: $(OLDEST_STAMP) ## the same tests on the oldest JAX
	@$(LIGHT_OLDEST) PYTEST_ARGS='-m "not slow" $(FEWER)' scripts/check.sh $(OLDEST)/bin/python tests

test-all: $(DEV_STAMP) $(OLDEST_STAMP) ## all tests, slow ones too, on the newest and the oldest JAX, the docs and the notebooks
	@failed=; scripts/check.sh $(PY) format lint types docstrings tests || failed=' tests-newest'; \
	scripts/check.sh $(OLDEST)/bin/python tests || failed="$$failed tests-oldest"; \
	$(MAKE) docs || failed="$$failed docs"; \
	$(MAKE) tutorial ARGS=--check || failed="$$failed notebooks"; \
	test -z "$$failed" || { echo "FAILED:$$failed" && exit 1; }

verify: $(DEV_STAMP) $(VERIFY_STAMPS) ## before a release: all tests on each JAX, notebooks, recordings, fuzz, faults (VERIFY="0.10.0 ...")
	@failed=; scripts/check.sh $(PY) types docstrings tests || failed=' tests-newest'; \
	for jax in $(VERIFY); do scripts/check.sh .venv-$$jax/bin/python types docstrings tests || failed="$$failed tests-$$jax"; done; \
	JAX_PLATFORMS=cpu $(PY) scripts/make_notebooks.py --check || failed="$$failed notebooks"; \
	$(PY) -m scripts.record_programs --check || failed="$$failed recordings"; \
	$(PY) -m scripts.verify_table --check || failed="$$failed verify"; \
	$(PY) scripts/fuzz.py || failed="$$failed fuzz"; \
	$(PY) scripts/faults.py || failed="$$failed faults"; \
	test -z "$$failed" || { echo "FAILED:$$failed" && exit 1; }

docs: $(DEV_STAMP) ## build the documentation as a site in site/ (flags in ARGS: --site-dir DIR)
	@NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(PY) -m mkdocs build $(ARGS)
	@echo 'To read it: $(PY) -m http.server --directory site'

tutorial: $(DEV_STAMP) ## run docs/tutorial.py and docs/notebooks/*.py, and make the notebooks of them (flags in ARGS: --check)
	@JAX_PLATFORMS=cpu $(PY) scripts/make_notebooks.py $(ARGS)

dist: $(DEV_STAMP) ## build the sdist and the wheel in dist/, check them, and use the wheel in a clean environment
	@JAX_PLATFORMS=cpu $(PY) scripts/make_dist.py

fuzz: $(DEV_STAMP) ## check random compositions of rules and random headers of safetensors files (flags in ARGS)
	@$(PY) scripts/fuzz.py $(ARGS)

faults: $(EXAMPLES_STAMP) ## kill, stop and replace processes of trainings, check that nothing is lost, and that no exit hangs (flags in ARGS)
	@$(PY) scripts/faults.py $(ARGS)

mutants: $(DEV_STAMP) ## change 200 places of scalax/ one at a time, and see which the tests miss (flags in ARGS: --count 20)
	@$(PY) -m scripts.mutants $(ARGS)

clean: ## delete what was built, cached or installed here, the environments too
	rm -rf $(VENV) $(OLDEST) $(RELEASE) $(OTHERS) $(VERIFY:%=.venv-%) build dist site *.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .mutants
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The newest JAX needs Python 3.12. With an older Python an older JAX is used, and every run says so.
$(EXAMPLES_STAMP): setup.py
	@scripts/setup_venv.sh $(VENV) newest -e '.[examples]'
	@$(PY) -c "import importlib.metadata as m, sys; sys.version_info < (3, 12) and print( \
	  'Note: the newest JAX needs Python 3.12 or later; with Python 3.11, the newest that was', \
	  'found here, JAX', m.version('jax'), 'is used.')" > $@.new
	@mv $@.new $@

# The compilers for TPUs and GPUs, which need none; only those of the newest JAX are tested.
$(PLAN_STAMP): $(EXAMPLES_STAMP) setup.py
	@scripts/setup_venv.sh $(VENV) newest -e '.[plan]'
	@touch $@

# JAX 0.10, which Python 3.11 gets, writes lines to stderr at each start where it has the compiler for GPUs.
$(DEV_STAMP): $(EXAMPLES_STAMP) setup.py
	@gpu=$$($(PY) -c 'import sys; print(",gpu-plan" if sys.version_info >= (3, 12) else "")') && \
	  scripts/setup_venv.sh $(VENV) newest -e ".[dev,plan$$gpu]"
	@touch $@

$(OLDEST_STAMP): setup.py
	@PYTHON='$(PYTHON_OLDEST)' scripts/setup_venv.sh $(OLDEST) oldest jax==0.10.0 jaxlib==0.10.0 -e '.[dev]'
	@touch $@

# JAX 0.10 with the oldest Python that fits: those who have it have no newer one. Later JAX needs Python 3.12.
$(VERIFY_STAMPS): .venv-%/.installed: setup.py
	@PYTHON='$(if $(filter 0.10.%,$*),$(PYTHON_OLDEST),$(PYTHON))' \
	  scripts/setup_venv.sh .venv-$* $(if $(filter 0.10.%,$*),oldest,newest) jax==$* -e '.[dev,plan]'
	@touch $@

# The release that `make bench ARGS="--against 0.2.5"` compares with. It runs on the newest JAX too.
$(RELEASE_STAMP):
	@scripts/setup_venv.sh $(RELEASE) newest scalax==0.2.5
	@touch $@

# Models that others wrote, for `make bench ARGS="--only others"` alone.
$(OTHERS_STAMP): setup.py benchmarks/unchanged/others.txt
	@scripts/setup_venv.sh $(OTHERS) newest -e '.[plan]' -r benchmarks/unchanged/others.txt
	@touch $@
