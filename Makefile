.PHONY: help demo test check fix protos docs bench testbed test-long system-deps buf
UV    := $(shell uv --version >/dev/null 2>&1 && command -v uv || echo .tools/bin/uv)
EXTRA ?= cpu
READY := .venv/.ready-$(EXTRA)
RUN    = $(UV) run --no-sync

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

.tools/bin/uv:
	python3 -m pip install --quiet --disable-pip-version-check --target .tools uv
	@echo '*' > .tools/.gitignore

$(READY): pyproject.toml uv.lock | $(filter .tools/%,$(UV))
	$(UV) sync --locked --extra $(EXTRA)
	@rm -f .venv/.ready-* && touch $@

protos: $(READY) ## regenerate the committed stubs
	$(RUN) python -m grpc_tools.protoc -Iprotos --python_out=protos --pyi_out=protos --grpc_python_out=protos --mypy_grpc_out=protos protos/etude/v1/*.proto

check: $(READY) ## format, lint, types, import rules
	$(RUN) ruff format --check .
	$(RUN) ruff check .
	$(RUN) mypy
	$(RUN) lint-imports

fix: $(READY) ## format and repair what can be repaired
	$(RUN) ruff format .
	$(RUN) ruff check --fix .

test: $(READY) ## unit, contract, integration
	$(RUN) pytest
