# What people, CI and pre-commit call. `make help` lists it.

.DEFAULT_GOAL := help
BIN := .venv/bin
JOBS ?= 3
export PYTHON
unexport PYTHONDONTWRITEBYTECODE  # each of the hundreds of processes of the tests would compile all that it imports

SUITE = $(BIN)/python -m tests.suite --load $(LOAD) -n $(JOBS) --dist worksteal $(if $(ORDER),--random-order)
NODES ?= 1
DURATION_S ?= 600
SEED ?= 0
LOAD ?= 0
LOG ?= embedded
QUICK_TESTS = $(BIN)/python -m pytest -q -m "not slow and not broker" \
  tests/docs tests/unit/test_layers.py tests/unit/test_docstrings.py

.NOTPARALLEL:  # two targets would make .venv at once
.PHONY: help setup demo kafka kafka-stop test test-fast slurm test-long test-vllm gpu histories simulate fmt generated lint types check ready docs bench curves faults hosts containers kubernetes soak constraints clean moved

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: .venv/.user  ## .venv with everything that a user needs
	@echo "$(BIN)/rftstream is ready: $(BIN)/rftstream --help"

demo: .venv/.user  ## set up, train a tiny model on sums, show what it learned (1 minute; ARGS=--no-open)
	@$(BIN)/rftstream demo $(ARGS)

kafka:  ## a real broker on this machine, at 127.0.0.1:9092; its address is the last line (PORT=, NODES=3)
	@scripts/system-packages broker
	@$(or $(PYTHON),python3) scripts/kafka start --nodes $(NODES) --port $(or $(PORT),9092)

kafka-stop:  ## ends it; its data stays in .cache/kafka/local
	@$(or $(PYTHON),python3) scripts/kafka stop

test: .venv/.developer lint types  ## set up, check everything, run all tests, on a real Kafka, too (ARGS="-k word" picks, LOAD=4 busy processes beside, ORDER=random)
	$(SUITE) -m "not gpu and not long and not vllm" $(ARGS)

slurm: .venv/.developer  ## the written batch script on a real SLURM of two nodes (make test draws two of these); then a table
	$(BIN)/python -m tests.slurm_cluster $(ARGS)

test-long: .venv/.developer  ## tests left out of make test: every mutant, and what takes many minutes
	$(BIN)/python -m pytest -m long $(ARGS)

test-vllm: .venv/.developer  ## the engine vLLM, in a build for CPUs that it installs (1 GB, minutes to start)
	scripts/setup vllm
	$(BIN)/python -m tests.suite -m "vllm and not gpu" $(ARGS)

gpu: .venv/.developer  ## the tests and measurements that need a GPU, with vLLM, in 12 minutes (docs/measured/gpu.json)
	scripts/setup gpu
	$(BIN)/python -m tests.suite -m gpu $(ARGS)
	$(BIN)/python -m benchmarks gpu --record

test-fast: .venv/.developer  ## the tests that take no more than seconds
	$(SUITE) -n 2 -m "not slow and not broker and not gpu and not long and not vllm" $(ARGS)

faults: .venv/.developer  ## whole runs with processes killed and stopped, from a seed (DURATION_S=, SEED=, LOG=kafka, SECURED=1 with TLS and ACLs, SCHEDULES=, LOAD= busy processes beside)
	$(BIN)/python -m tests.faults --log $(LOG) --seed $(SEED) --duration-s $(DURATION_S) --load $(LOAD) \
	  $(if $(SECURED),--secured) $(if $(SCHEDULES),--schedules $(SCHEDULES)) --json faults.json

soak: .venv/.developer  ## a run that goes on for DURATION_S= (an hour: 3600) or SIMULATED_HOURS=, and whether anything in it grows
	$(BIN)/python -m tests.soak $(if $(SIMULATED_HOURS),--simulated-hours $(SIMULATED_HOURS),--duration-s $(DURATION_S)) \
	  --json soak.json --picture soak.png

hosts: .venv/.developer  ## a run on hosts with networks of their own, which die, are cut off and slow; as root (SEEDS=0:20 KIND=schedules|ranks)
	$(BIN)/python -m tests.hosts --seeds $(or $(SEEDS),0:20) --kind $(or $(KIND),all) --json hosts.json

containers: .venv/.developer  ## a real Docker engine, the images, docker-compose.yml with kills and full disks; as root, in minutes; then a table
	$(BIN)/python -m tests.containers $(ARGS)

kubernetes: .venv/.developer  ## releases of the Helm chart on a real Kubernetes, which is built the first time; then a table
	$(BIN)/python -m tests.kubernetes $(ARGS)

histories: .venv/.developer  ## random histories of agents and environments, replayed through the model (NUM=, SEED=)
	HISTORIES=$(or $(NUM),10000) HISTORIES_SEED=$(or $(SEED),0) $(BIN)/python -m pytest -s tests/flow/test_logprobs.py tests/unit/models/test_splice.py $(ARGS)

simulate: .venv/.developer  ## all roles in one process, faults from seeds, all laws checked (SEEDS=0:20000, JOBS=)
	$(BIN)/python -m tests.simulation $(or $(SEEDS),0:1000) --jobs $(JOBS)
	$(BIN)/python -m tests.simulation $(or $(SEEDS),0:5000) --jobs $(JOBS) --pipelines
	$(BIN)/python -m tests.simulation $(or $(SEEDS),0:1000) --jobs $(JOBS) --ranks

fmt: .venv/.checks  ## put code into its form
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

generated: .venv/.checks  ## write what follows from the code: parts of the docs, pictures, schemas, dashboards
	$(BIN)/python docs/generate.py

ready: .venv/.developer  ## before a commit: form and generated files are written; then types, docs and the tests that see the change (SINCE=main, MINUTES=)
	@$(MAKE) --no-print-directory fmt generated types
	$(QUICK_TESTS)
	$(BIN)/python -m scripts.affected --since $(or $(SINCE),HEAD) --minutes $(or $(MINUTES),1) --jobs $(JOBS)

check: lint  ## what takes two minutes: form, generated files, links and, beside these, types
	@$(MAKE) --no-print-directory types & $(QUICK_TESTS); tests=$$?; wait $$! && exit $$tests

lint: .venv/.checks  ## ruff: errors and form
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --output-format concise .

types: .venv/.checks  ## mypy --strict
	$(BIN)/mypy

docs: .venv/.checks  ## the docs as a site with search, in build/site
	$(BIN)/python docs/build_site.py

bench: .venv/.developer  ## measure, beside references, into bench.json (ONLY="log idle" picks; RECORD=1 for docs/performance.md, too)
	$(BIN)/python -m benchmarks $(ONLY) $(if $(RECORD),--record && $(BIN)/python docs/generate.py)

curves: .venv/.developer  ## run examples (an hour) and experiments (hours) to their ends, for docs; goes on where it stood (ONLY="algorithms/gspo staleness trl", SEEDS=0:3, MISSING=1)
	$(BIN)/python -m scripts.curves $(ONLY) $(if $(SEEDS),--seeds $(SEEDS)) $(if $(MISSING),--missing)
	$(BIN)/python docs/generate.py

constraints: .venv/.user  ## newest versions of all dependencies into constraints.txt
	scripts/constraints

clean:  ## remove .venv, caches and build output; runs stay
	rm -rf .venv .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist bench.json scale.json faults.json hosts.json soak.json soak.png ./*.egg-info
	find rftstream workers schemas tests benchmarks examples scripts -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.user .venv/.checks .venv/.developer: pyproject.toml constraints.txt scripts/setup scripts/system-packages $(shell scripts/setup moved)
	@scripts/setup $(@:.venv/.%=%)

moved: ;
