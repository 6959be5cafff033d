# One command to play, one to test:
#
#   make serve   install what the server needs, build it, serve on http://localhost:7860   (PORT=, WORKERS=)
#   make test    install what the tests need and run them (`make soak`: those of minutes under load)
#
# Everything is installed into .venv from the pinned requirement files. A stamp file per step remembers what is done.

PORT ?= 7860
WORKERS ?= 1
VENV ?= .venv
ENGINE_VENV ?= .venv-engine
SITE_VENV ?= .venv-site
BOOTSTRAP_PYTHON ?= $(shell command -v python3.11 || command -v python3)
# Which build of torch: uv takes the one for this machine's GPU, or the small one where there is none. Another choice:
# name a file (`make rl TORCH=path/to/wheel`), or point pip at a place that has one (PIP_FIND_LINKS).
TORCH ?= torch==2.13.0
# What benchmarks/speed/interfaces.py compares with; no requirement file holds it.
PEERS ?= envpool==1.2.5
SBOM_TOOL ?= cyclonedx-bom==7.5.0
TESTS ?= tests
BASE ?= HEAD
QUICK := not slow and not soak and not engine
SLOW := slow and not soak and not engine
# Three processes keep two cores busy: many tests wait for servers. Of the quick tests, who has none left takes half of
# another's; slow ones stay with those of their file, which share wheels and environments.
SPREAD := -n 3 --dist worksteal
SPREAD_SLOW := -n 3 --dist loadfile

# Modules are compiled once: where this is set, each start of the server would compile many of them anew.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
PYTHON := $(BIN)/python
STAMPS := $(VENV)/.stamps
PACKAGES := inferencegym simulator env grader agents ops live server cli
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' inferencegym/__init__.py)
# A module is compiled when its .pxd lies beside it, kernel and events with those of their folder; changing one rebuilds.
DECLARATIONS := $(foreach package,$(PACKAGES),$(shell find $(package) -name '*.pxd' 2>/dev/null))
COMPILED_SOURCES := $(sort $(DECLARATIONS) $(DECLARATIONS:.pxd=.py) $(wildcard simulator/kernel/*.py simulator/events/*.py))
# pip installs uv, and uv all else, in a third of pip's time. Requirement files: scripts/pin_requirements.sh.
PIP_INSTALL := $(PYTHON) -m pip install --quiet --disable-pip-version-check
INSTALL := $(BIN)/uv pip install --quiet --python $(PYTHON)

.PHONY: help serve install dev rl peers engine test test-fast test-changed test-servers soak check lint types tidy documents site format bench openenv openenv-oldest gymnasium pins sbom audit build clean

help:
	@sed -n '3,4p' Makefile | cut -c 3-
	@echo '  make check | format | site | bench | soak | engine | openenv | gymnasium | sbom | audit | pins | build | clean'

# --- Installing ----------------------------------------------------------------------------------------------------

install: $(STAMPS)/package
dev: $(STAMPS)/dev $(STAMPS)/package
rl: $(STAMPS)/rl $(STAMPS)/package
peers: $(STAMPS)/peers $(STAMPS)/rl $(STAMPS)/package
build: $(STAMPS)/package

$(PYTHON):
	@scripts/check_machine.sh $(BOOTSTRAP_PYTHON)
	@$(BOOTSTRAP_PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# Asked at every run: what was missing may be there now.
test-servers:
	@scripts/install_test_servers.sh

$(STAMPS)/build: requirements-build.txt | $(PYTHON)
	@$(PIP_INSTALL) --no-compile --require-hashes -r requirements-build.txt
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/server: requirements.txt $(STAMPS)/build
	@echo 'Installing what the server needs into $(VENV) (once)'
	@$(INSTALL) --require-hashes -r requirements.txt
	@touch $@

$(STAMPS)/dev: requirements-dev.txt $(STAMPS)/server
	@echo 'Installing the tests and linters, OpenEnv and Ray (once, some minutes)'
	@$(INSTALL) -r requirements-dev.txt
	@touch $@

$(STAMPS)/rl: requirements-rl.txt $(STAMPS)/dev
	@echo 'Installing what trains agents ($(TORCH) and Stable-Baselines3)'
	@if [ "$(origin TORCH)" != file ] || [ -n "$$PIP_FIND_LINKS" ]; then $(PIP_INSTALL) '$(TORCH)'; \
	elif ! $(INSTALL) --torch-backend=auto '$(TORCH)'; then \
		echo 'torch made for this machine cannot be had: installing the default, on Linux several GB'; \
		$(PIP_INSTALL) '$(TORCH)'; \
	fi
	@$(INSTALL) -r requirements-rl.txt
	@touch $@

$(STAMPS)/peers: $(STAMPS)/dev
	@echo 'Installing what `make bench` compares with (EnvPool: 750 MB)'
	@$(INSTALL) '$(PEERS)'
	@touch $@

$(STAMPS)/package: pyproject.toml setup.py openenv.yaml $(COMPILED_SOURCES) $(STAMPS)/server
	@echo 'Building the package'
	@$(PYTHON) -m scripts.kernel_types
	@$(INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@

# --- Running -------------------------------------------------------------------------------------------------------

serve: $(STAMPS)/package
	@echo 'Serving on http://localhost:$(PORT) (page: /web, interface: /docs); Ctrl-C ends it, PORT=... serves elsewhere'
	@INFERENCEGYM_PORT=$(PORT) INFERENCEGYM_WORKERS=$(WORKERS) exec $(BIN)/inferencegym serve

# What is not there (`make peers`) is left out, and said so.
bench: $(STAMPS)/dev $(STAMPS)/package
	@status=0; for benchmark in interfaces openenv_server neighbours ray_workers events; do \
		echo "== $$benchmark"; $(PYTHON) -m benchmarks.speed.$$benchmark || status=1; \
	done; exit $$status

# --- Checking ------------------------------------------------------------------------------------------------------

# The quick tests first, then, if they pass, the slow ones. What they start (Redis, Chromium) is installed before where
# that is allowed; elsewhere the tests that need it are skipped, and the last lines say so.
# TESTS=PATH runs those of a path. It may have quick tests only, or slow ones only (pytest's status 5: none collected);
# with neither, the command fails.
test: test-servers $(STAMPS)/rl $(STAMPS)/package
	@quick=0; $(PYTHON) -m pytest $(TESTS) -m '$(QUICK)' $(SPREAD) || quick=$$?; \
	[ $$quick = 0 ] || [ $$quick = 5 ] || exit $$quick; \
	slow=0; $(PYTHON) -m pytest $(TESTS) -m '$(SLOW)' $(SPREAD_SLOW) || slow=$$?; \
	[ $$slow != 5 ] || exit $$quick; exit $$slow
	@scripts/install_test_servers.sh --check

test-fast: test-servers $(STAMPS)/rl $(STAMPS)/package
	$(PYTHON) -m pytest $(TESTS) -m '$(QUICK)' $(SPREAD)

# The quick tests nearest to what has changed since the last commit (BASE=main: since main): a minute or two, not all
# that a change may break. Nothing is installed where there is none. MAKE_COMMAND: `make -n` would run a line with MAKE.
test-changed:
	@tests=$$(python3 -m scripts.changed_tests --base $(BASE)) || exit 1; \
	[ -n "$$tests" ] || { echo 'No test is near what has changed; `make test-fast` runs all that are quick'; exit 0; }; \
	$(MAKE_COMMAND) --no-print-directory $(STAMPS)/rl $(STAMPS)/package || exit 1; \
	$(PYTHON) -m pytest $$tests -m '$(QUICK)' -n 2 || [ $$? = 5 ]

# They print what they did, and the seed of what is random: SOAK_SEED=... plays those histories again.
soak: test-servers $(STAMPS)/rl $(STAMPS)/package
	$(PYTHON) -m pytest $(TESTS) -m soak -s

# The tests on a real vLLM, which is installed into an environment of its own.
engine: $(STAMPS)/dev $(STAMPS)/package
	UV=$(BIN)/uv scripts/install_engine.sh $(ENGINE_VENV)
	ENGINE_VENV=$(ENGINE_VENV) $(PYTHON) -m pytest $(TESTS) -m engine

check: lint types tidy documents

lint: $(STAMPS)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

# Marks of a merge, dead code, duplicated code, spelling, the Dockerfile.
tidy: $(STAMPS)/dev
	@! git grep -nE '^(<<<<<<<|>>>>>>>) '
	@if [ -x $(BIN)/hadolint ]; then $(BIN)/hadolint Dockerfile; else echo 'No hadolint for this platform'; fi
	$(BIN)/vulture
	$(BIN)/pylint $(PACKAGES) scripts benchmarks
	$(BIN)/codespell

# Links and generated blocks of the documents, licences and checksums of the data.
documents: $(STAMPS)/dev $(STAMPS)/package
	$(PYTHON) scripts/check_links.py
	$(PYTHON) scripts/check_data_notices.py
	$(PYTHON) scripts/render_docs.py --check

# The documents as a static site in build/site, every link checked; its generator has an environment of its own.
site: $(STAMPS)/dev $(SITE_VENV)/.installed
	$(PYTHON) -m scripts.build_site --generator $(SITE_VENV)/bin/zensical

$(SITE_VENV)/.installed: requirements-site.txt $(STAMPS)/build
	@$(PYTHON) -m venv --without-pip $(SITE_VENV)
	@$(BIN)/uv pip install --quiet --python $(SITE_VENV)/bin/python -r requirements-site.txt
	@touch $@

# With the training libraries installed, so that their types are checked too.
types: $(STAMPS)/rl
	$(BIN)/mypy

format: $(STAMPS)/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# OpenEnv's own verdicts on the directory, a running server and a played episode.
openenv: openenv-oldest
	$(PYTHON) -m scripts.openenv_check

openenv-oldest: $(STAMPS)/dev $(STAMPS)/package
	PYTHON=$(PYTHON) scripts/openenv_oldest.sh

# The Gymnasium environments on a newer version than RLlib lets the pins have.
gymnasium: $(STAMPS)/dev $(STAMPS)/package
	PYTHON=$(PYTHON) scripts/newest_gymnasium.sh

# What the server is made of, as CycloneDX: build/sbom.cdx.json, the same file for the same pins.
sbom: $(STAMPS)/dev
	@mkdir -p build
	@# The tool reads a version from the project's file only where it stands there, and the package computes its own.
	@sed 's/^dynamic = \["version"\]/version = "$(VERSION)"/' pyproject.toml > build/pyproject.toml
	@# In an environment of its own: one of its packages slows down what uses jsonschema. A list of pins knows no
	@# dependency graph; the tool warns of that.
	@PYTHONWARNINGS=ignore $(BIN)/uv tool run --quiet --python $(PYTHON) --from '$(SBOM_TOOL)' cyclonedx-py requirements --pyproject build/pyproject.toml --output-reproducible \
		-o build/sbom.cdx.json requirements.txt
	@echo 'build/sbom.cdx.json'

# Known vulnerabilities of the server's pins; says so where the advisory source cannot be reached.
audit: $(STAMPS)/dev
	@$(PYTHON) scripts/audit_dependencies.py

pins: $(STAMPS)/dev
	UV=$(BIN)/uv scripts/pin_requirements.sh

# --- Cleaning ------------------------------------------------------------------------------------------------------

clean:
	rm -rf build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache $(STAMPS)/package
	find $(PACKAGES) -name '*.so' -delete
	find $(PACKAGES) tests -name __pycache__ -type d -prune -exec rm -rf {} +
