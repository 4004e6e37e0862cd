# make demo: answer with the model in models/.   make test: the whole test suite.   Both set up .venv first.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TEST_STAMP := $(VENV)/.installed-test
TORCH_STAMP := $(VENV)/.installed-torch
SOURCES := pyproject.toml CMakeLists.txt $(wildcard src/strata/native/csrc/*) $(wildcard src/strata/native/csrc/fused/*)
DEMO_MODEL := models/tiny-flash-next-Q8_0.gguf
PROMPT ?= What does the ls command do?

.PHONY: demo test check soak clean

demo: $(STAMP)
	$(BIN)/strata run $(DEMO_MODEL) "$(PROMPT)" --device cpu --max-tokens 120

test: $(TEST_STAMP)
	$(BIN)/python -m pytest -q -m "not soak and not gpu"

soak: $(TEST_STAMP)
	$(BIN)/python -m pytest -q -m soak --timeout 7200

check: $(TEST_STAMP)
	$(BIN)/python -m pip install -q "ruff>=0.9" "mypy>=1.14" types-psutil
	$(BIN)/ruff check src tests scripts
	$(BIN)/ruff format --check src tests scripts
	$(BIN)/mypy

# torch comes first and by name, so that nothing else pulls in a larger build of it
$(TORCH_STAMP):
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q "$(TORCH)"
	touch $(TORCH_STAMP)

$(STAMP): $(TORCH_STAMP) $(SOURCES)
	$(BIN)/python -m pip install -q --editable .
	touch $(STAMP)

# one build for both stamps
$(TEST_STAMP): $(TORCH_STAMP) $(SOURCES)
	$(BIN)/python -m pip install -q --editable ".[test]"
	touch $(STAMP) $(TEST_STAMP)

clean:
	rm -rf $(VENV) build
