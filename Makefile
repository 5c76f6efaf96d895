# make train | test | check are all that a newcomer needs; the rest wraps the harness command.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(shell cat requirements.txt requirements-apart.txt pyproject.toml | cksum | cut -d' ' -f1)

DOCS_STAMP := $(VENV)/.docs-$(shell cat requirements-docs.txt | cksum | cut -d' ' -f1)

NODES ?= 1:3
STEPS ?= 150
MARKET ?= demo
SEEDS ?= 1000
FAULTS ?= 2000
# processes that test at once (tests/conftest.py says which gets what): one more than there are
# cores, since most of them wait most of the time
WORKERS ?= $(shell expr $$(nproc) + 1)
REDUCE ?= exact
ifndef RUN
RUN := runs/$(shell date +%Y%m%d-%H%M%S)
endif
LAUNCH = $(BIN)/harness launch sky_tasks/train.yaml --cloud local --env STEPS=$(STEPS) --env REDUCE=$(REDUCE) $(ARGS)

TASK ?= sky_tasks/train.yaml
LAB ?= /var/tmp/harness-lab

DASHBOARDS ?= dashboards.json
# proofs that are no tests: modules of tests/support
SUPPORT = PYTHONPATH=$(CURDIR):$(CURDIR)/tests $(BIN)/python -m support

.PHONY: help docs map install train launch jobs-launch plan down doctor dashboards wandb lab lab-short test proofs adapters check lint types pythons sim simsystem walk paths longrun drill meshes manynodes gray campaign soak guards audit money gpu clean
help:  ## these lines
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/\1|\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{ printf "make %-14s %s\n", $$1, $$2 }'
install: $(STAMP)
$(STAMP): requirements.txt requirements-apart.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "the pinned environment wants Python 3.11 or newer, this is " + sys.version + "; make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-apart.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@rm -f $(VENV)/.installed-* && touch $@

train: install  ## train a small GPT on machines that are taken away while you watch; then the same undisturbed, and compare
	$(LAUNCH) --run $(RUN) --nodes $(NODES) --market $(MARKET)
ifneq ($(MARKET),calm)
	@echo; echo "Now the same training on one node that nothing disturbs, to compare:"
	$(LAUNCH) --run $(RUN)-calm --nodes 1 --market calm --brief
	$(BIN)/harness runs compare $(RUN) $(RUN)-calm
endif

plan: install  ## ranked offers, world and first choice of TASK on SkyPilot's clouds; launches nothing (CLOUDS=aws,gcp: without accounts)
	$(BIN)/harness launch $(TASK) --cloud sky --dry-run --run $(RUN) --nodes $(NODES) $(if $(CLOUDS),--clouds $(CLOUDS)) $(ARGS)

launch: install bucket doctor  ## TASK on SkyPilot's clouds under our recovery loop (costs money): make launch RUN=s3://... NODES=1:8 BUDGET=200
	$(BIN)/harness launch $(TASK) --cloud sky --run $(RUN) --nodes $(NODES) $(if $(BUDGET),--budget-usd $(BUDGET)) $(ARGS)

jobs-launch: install bucket  ## the same TASK as a managed job of SkyPilot (costs money): make jobs-launch RUN=s3://...
	$(BIN)/sky jobs launch $(TASK) --env RUN=$(RUN) --env HARNESS_PRICES="$$($(BIN)/harness market prices $(TASK))" $(ARGS)

down: install bucket  ## stop RUN and end every node of it; proven by asking SkyPilot
	$(BIN)/harness down $(RUN)

doctor: install  ## is everything in place for a launch of TASK? costs nothing
	$(BIN)/harness prove doctor $(TASK) $(if $(filter command% environment%,$(origin RUN)),--run $(RUN))

dashboards: install  ## W&B's workspace and report for a project, from code (WANDB_API_KEY; without one their definition is written to DASHBOARDS=dashboards.json)
	$(BIN)/harness runs dashboards $(if $(WANDB_API_KEY),,--out $(DASHBOARDS)) $(ARGS)

.PHONY: bucket
bucket:
	@case "$(RUN)" in *://*) ;; *) echo 'name the run: make $(MAKECMDGOALS) RUN=s3://my-bucket/runs/x'; exit 2;; esac

wandb: install  ## a real training with losses of nodes, workers and publishers, told to W&B on loopback, and read back (some minutes)
	HARNESS_HEAVY=1 $(BIN)/python -m pytest $(if $(CI),-p no:cacheprovider) tests/look/test_wandb_training.py

lab: install  ## real SkyPilot on loopback Slurm clusters: everything that can happen to a run (root on Debian 12; half an hour and more)
	$(BIN)/python tests/slurm/lab.py play $(LAB)

lab-short: install  ## its first minutes as a test: two nodes, power cuts, the move to the dearer cloud, stop, verify, nothing left
	HARNESS_LAB=$(LAB) $(BIN)/python -m pytest $(if $(CI),-p no:cacheprovider) tests/slurm/test_lab.py

# make test ROOM=data runs the tests of one room, ROOM=spine those of all rooms that need no other
SPINE := storage core bucket ledger node notices rendezvous uploader agent worker controller clouds
TESTS = $(if $(ROOM),$(patsubst %,tests/%,$(subst spine,$(SPINE),$(ROOM))),tests)
# What fails while others run beside it is run once more, alone, and fails if it fails again. Both
# outputs are printed: the first one may show a fault that needs a busy machine.
define run_tests
	@$(2) $(1)/bin/python -m pytest -n $(WORKERS) --dist loadscope $(3) || { [ $$? = 1 ] && \
	echo "===== once more, alone: what failed beside others (its first output is above)" && \
	$(2) $(1)/bin/python -m pytest -x --last-failed --last-failed-no-failures none $(3); }
endef
test: install
	$(call run_tests,$(VENV),,-m "not proof and not mesh" $(TESTS))

proofs: install  ## slow proofs: long runs, kills of every process, budgets, the simulated system, plain loops (minutes)
	$(call run_tests,$(VENV),,--no-loadscope-reorder -m proof $(TESTS))  # else the longest comes last

ADAPTERS := .venv-adapters
TRAINERS ?= tests/adapters
ADAPTERS_STAMP := $(ADAPTERS)/.installed-$(shell cat requirements-adapters.txt pyproject.toml | cksum | cut -d' ' -f1)
adapters: $(ADAPTERS_STAMP)  ## Hugging Face, Accelerate, Lightning and torchtitan scripts, unchanged, on machines that are taken away (minutes)
	$(call run_tests,$(ADAPTERS),HARNESS_TRAINERS=1,$(TRAINERS))
	$(if $(filter tests/adapters,$(TRAINERS)),PYTHONPATH=$(CURDIR)/tests $(ADAPTERS)/bin/python -m support.reach adapters --record)
$(ADAPTERS_STAMP): requirements-adapters.txt pyproject.toml
	$(PYTHON) -m venv $(ADAPTERS)
	$(ADAPTERS)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(ADAPTERS)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-adapters.txt
	$(ADAPTERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@rm -f $(ADAPTERS)/.installed-* && touch $@

check: lint types test
lint: install
	$(BIN)/ruff check .
types: install
	$(BIN)/mypy

docs: $(DOCS_STAMP)  ## the documentation site in build/docs, and how many words it has; no warning, no dead link
	@rm -rf build/docs-source && mkdir -p build && cp -r docs build/docs-source
	$(BIN)/python -m sphinx -q -W --keep-going -b html build/docs-source build/docs
	@$(SUPPORT).words
	@echo "open build/docs/index.html"
$(DOCS_STAMP): requirements-docs.txt $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-docs.txt
	@rm -f $(VENV)/.docs-* && touch $@

map: install  ## docs/design/MAP.md: a row for each file, from the first sentence of its docstring
	$(SUPPORT).map

pythons: install  ## the package and its light tests under every Python that is here, of those that pyproject.toml names
	$(SUPPORT).pythons $(VENV)/pythons

sim: install  ## one seed (SEED=413) or many (SEEDS=1000) of the simulated world
	$(BIN)/harness market simulate $(if $(SEED),--seed $(SEED),--seeds $(SEEDS))

simsystem: install  ## whole systems simulated: SEEDS=100000 on all cores (JOBS), or one as a timeline (SEED=413)
	$(SUPPORT) system $(if $(SEED),--seed $(SEED),--seeds $(if $(filter file,$(origin SEEDS)),100000,$(SEEDS)) --jobs $(or $(JOBS),$(shell nproc)))

walk: install  ## the same weights to the bit over 300 steps in five worlds with kills, DDP and FSDP2; and not so with float sums (30 minutes)
	$(BIN)/python benchmarks/walk.py --steps 300

paths: install  ## how many files a step, a notice and a bill walk through, beside their ceilings (a minute; ARGS=--files lists them)
	$(BIN)/python benchmarks/paths.py $(ARGS)

longrun: install  ## a run of a month, and what it costs to look at it, join it and prove it (DAYS=1 for a quick look)
	$(BIN)/python benchmarks/longrun.py --days $(or $(DAYS),30)

drill: install  ## every fault in every phase (ONLY=worker-kill:step for one cell)
	$(BIN)/harness prove drill --seed $(or $(SEED),0) --jobs $(or $(JOBS),2) $(if $(ONLY),--only $(ONLY))

meshes: install  ## models on meshes of up to eight ranks: equal to one rank's, resharded, with nodes that come and go (many minutes)
	$(call run_tests,$(VENV),,-m "mesh$(if $(CI), and not proof)" tests/meshes)  # CI has run the proofs
	$(SUPPORT).reach meshes --record

manynodes: install  ## 1 to 256 simulated members and snapshots of up to 1,024 ranks: seconds, requests, connections, beside their targets
	$(BIN)/python benchmarks/manynodes.py

gray: install  ## each request of a node answered never, at 20 B/s, by half, twice, before and amid a notice (half an hour; GRAY_JOBS=4; CELLS='start hang')
	HARNESS_HEAVY=1 GRAY_CELLS="$(CELLS)" $(BIN)/python -m pytest -s $(if $(CI),-p no:cacheprovider) tests/agent/test_silent_store.py

campaign: install  ## POINTS=500 kills of writer, uploader and agent each, every store call failing once, damage of every class; not in CI
	$(SUPPORT).kill_campaign --points $(or $(POINTS),500) --seed $(or $(SEED),0) --jobs $(or $(JOBS),2)

soak: install  ## FAULTS=2000 kills, pauses and store faults over RUNS=4 led runs; memory, files and threads of every seat; not in CI
	$(SUPPORT) soak $(FAULTS) --runs $(or $(RUNS),4) --seed $(or $(SEED),0)

guards: install  ## BAD=100 trainings with bad steps and HEALTHY=200 without, on 1 to 3 ranks: found, named and left out exactly
	$(SUPPORT) guards --faults $(or $(BAD),100) --healthy $(or $(HEALTHY),200) --first $(or $(FIRST),0)

audit: install  ## all that a hostile day does, as a table of figures; fails unless all of it is handled (some minutes)
	$(SUPPORT).hostile_day

money: install  ## SEEDS=10000 simulated runs with slow and lying clouds and dying controllers: no budget is broken, nothing leaks
	$(SUPPORT) money $(if $(SEED),--seed $(SEED),--seeds $(if $(filter file,$(origin SEEDS)),10000,$(SEEDS)) --jobs $(or $(JOBS),$(shell nproc)))

gpu:  ## everything that only a GPU can show, in ten minutes, with the torch that is here (PART=exact,pause LIMIT_S=540 OUT=runs/gpu WHEELS=folder)
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m benchmarks.gpu --limit-s $(or $(LIMIT_S),540) $(if $(PART),--part $(PART)) $(if $(OUT),--out $(OUT)) $(if $(WHEELS),--wheels $(WHEELS)) $(ARGS)

clean:
	rm -rf $(VENV) $(ADAPTERS) .pytest_cache .mypy_cache .ruff_cache build *.egg-info
