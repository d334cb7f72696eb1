# Needs a Linux with Python 3.11 or later and make. What else a target needs it installs into .venv, which
# goes on from there next time and anew when pyproject.toml, setup.py or a .proto changes.

PYTHON ?= python3
BIN := .venv/bin
SOURCES := pyproject.toml setup.py $(wildcard proto/*/*/*.proto)

.DEFAULT_GOAL := help
.PHONY: help demo serve test lint proto clean

help:  ## Say what there is
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 8

demo: .venv/server  ## Start the service with the demo model, drive it from a client process, stop it
	@$(BIN)/python scripts/demo.py

serve: .venv/server  ## Run the service; options in ARGS="--model ... --listen ..."
	@exec $(BIN)/decodestep serve $(ARGS)

test: .venv/dev  ## Run the tests; some of them with ARGS="tests/service -k step"
	@$(BIN)/pytest $(ARGS)

lint: .venv/dev  ## Check format, style, types, contract and who imports whom
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy -p decodestep.accel -p decodestep.service -p decodestep.client
	$(BIN)/buf lint
	$(BIN)/lint-imports --no-cache

proto: .venv/server  ## Make the Python code of proto/ in build/proto, where it is older

clean:  ## Remove .venv and all that was built
	rm -rf .venv build dist *.egg-info .*_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# Debian keeps venv in a package of its own.
.venv/bin/pip:
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		test "$$(id -u)" = 0 && apt-get -q update && apt-get -qy install python3-venv; } || { \
		echo "install Python 3.11 or later with venv first: apt-get install python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed")'
	$(PYTHON) -m venv --clear .venv

.venv/server: .venv/bin/pip $(SOURCES)
	$(BIN)/pip install --quiet --editable '.[server]'
	@touch $@

.venv/dev: .venv/bin/pip $(SOURCES)
	$(BIN)/pip install --quiet --editable '.[server,dev]'
	@mkdir -p build/mypy/decodestep
	@for link in accel:accel service:service client:client/python v1:build/proto/decodestep/v1; do \
		ln -sfn "$(CURDIR)/$${link#*:}" "build/mypy/decodestep/$${link%%:*}"; done
	@touch $@ .venv/server
