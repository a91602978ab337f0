# make run    set up, then `lockstep train $(ARGS)`; without ARGS the built-in quick start
# make test   set up with the tools for development, then the tests
#
# Everything goes into $VIRTUAL_ENV where one is active, else into .venv here; nothing else is touched.
# Another Python: make PYTHON=python3.12 run. Works with GNU make from 3.81 on and any POSIX shell.

PYTHON ?= python3
ARGS ?=
N ?= 200
SEED ?= 1

ifeq ($(strip $(VIRTUAL_ENV)),)
VENV := .venv
else
VENV := $(VIRTUAL_ENV)
endif

# The first line of a set-up: an environment with a Python that will do.
define environment
@if [ ! -x "$(VENV)/bin/python" ]; then \
  "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
    echo "make: $(PYTHON) is missing or older than Python 3.11: try make PYTHON=python3.12 run" >&2; \
    exit 1; }; \
  "$(PYTHON)" -c 'import venv, ensurepip' 2>/dev/null || { \
    echo "make: $(PYTHON) has no venv module (on Debian and Ubuntu: apt install python3-venv)" >&2; \
    exit 1; }; \
  echo "making $(VENV)"; \
  "$(PYTHON)" -m venv "$(VENV)" || exit 1; \
fi; \
"$(VENV)/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
  echo "make: the Python of $(VENV) is older than 3.11" >&2; exit 1; }
endef

# $(1): the stamps to write, the first one being the one that is asked for; $(2): what pip installs.
# A stamp holds this folder's name and a checksum of every pyproject.toml, so an installation is made again only when
# one of them has changed. torch comes first and by itself: pip takes the wheel for this platform (on Linux the CUDA one of
# the registry, or a CPU wheel where pip is configured with one through find-links; on macOS the plain one), and what
# follows is content with the torch it finds.
define install
@wanted="$$(pwd) $$(cat pyproject.toml packages/*/pyproject.toml | cksum)"; \
if [ "$$(cat "$(VENV)/$(firstword $(1))" 2>/dev/null)" != "$$wanted" ]; then \
  echo "installing into $(VENV)"; \
  "$(VENV)/bin/python" -c 'import torch' 2>/dev/null || \
    "$(VENV)/bin/python" -m pip install -q "torch==2.13.0" || exit 1; \
  "$(VENV)/bin/python" -m pip install -q -e "$(2)" $(PACKAGES) || exit 1; \
  for stamp in $(1); do echo "$$wanted" > "$(VENV)/$$stamp"; done; \
fi
endef

# The distributions beside lockstep-train, which pip would ask an index for otherwise.
PACKAGES := $(patsubst %,-e %,$(wildcard packages/*))

.PHONY: help run test crossed check site size setup setup-dev

help:
	@echo "make run [ARGS='RUN.yaml key=value ...']  set up, then train; without ARGS the quick start"
	@echo "make test [ARGS='pytest arguments']       set up for development, then the quick tests"
	@echo "make crossed [N=200 SEED=1]               drawn runs beside one process and the plain reference"
	@echo "make check                                formatting, lint, types"
	@echo "make site                                 the documentation as a site, in build/site; every link is checked"
	@echo "make size                                 lines of code by room, and of each distribution"
	@echo "make setup                                set up only"
	@echo "Variables: PYTHON=python3.12 chooses the Python; an active virtual environment is used as it is."

setup:
	$(environment)
	$(call install,.lockstep-run,.)

setup-dev:
	$(environment)
	$(call install,.lockstep-dev .lockstep-run,.[dev])

run: setup
	@"$(VENV)/bin/lockstep" train $(ARGS)

# Images of Python set it, and pytest would rewrite every file of tests anew, in each of its processes.
test: export PYTHONDONTWRITEBYTECODE :=
test: setup-dev
	@"$(VENV)/bin/python" -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "(not processes or kernel) and not slow and not long and not gpu and not cluster" $(ARGS)

# Of a seed the first N. What fails is shrunk and written into tests/crossed/cases; RECORD=FILE is gone on with.
crossed: export PYTHONPATH := tests
crossed: export HF_HUB_OFFLINE := 1
crossed: export OMP_NUM_THREADS := 1
crossed: setup-dev
	@"$(VENV)/bin/python" -m crossed -n $(N) --seed $(SEED) $(if $(RECORD),--record $(RECORD)) $(ARGS)

check: setup-dev
	@"$(VENV)/bin/python" -m ruff format --check .
	@"$(VENV)/bin/python" -m ruff check .
	@"$(VENV)/bin/python" -m mypy

# In an environment of its own, which needs nothing of lockstep.
size:
	@"$(PYTHON)" benchmarks/size.py

site: SITE := build/docs-environment
site:
	@$(SITE)/bin/python -c "import mkdocstrings, packaging, pydantic, rich, yaml, zensical" 2> /dev/null || { "$(PYTHON)" -m venv $(SITE) && $(SITE)/bin/python -m pip install -q $$("$(PYTHON)" -c "import tomllib; \
	  print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'])"); }
	@$(SITE)/bin/python docs/site.py
	@$(SITE)/bin/zensical build --strict --clean --config-file mkdocs.yml
	@"$(PYTHON)" docs/publish.py
