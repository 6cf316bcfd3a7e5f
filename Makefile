# Every target works on a fresh Linux machine with Python >= 3.11 and pip: uv and the locked
# dependencies come by themselves.
.PHONY: help demo demo-realtime smollm2 check fix test test-system test-gpu test-long fuzz-frames chaos-weights minio event-servers testbed test-operator e2e e2e-realtime microvms test-env protos docs chart-readme bench bench-env bench-weights bench-autoscaler bench-operator bench-ab bench-routing bench-learner bench-gateway bench-trl oracles bench-monitors bench-ledger bench-credit bench-branches bench-repos bench-toolchains bench-hacks bench-images bench-groups bench-tasks bench-scale bench-lending bench-resume chaos-trainer bench-demo-variants bench-mtp bench-moe bench-sft bench-trainer bench-long-rollouts test-privacy search-model bench-search system-deps buf
UV    := $(shell uv --version >/dev/null 2>&1 && command -v uv || echo .tools/bin/uv)
EXTRA ?= cpu
READY := .venv/.ready-$(EXTRA)
RUN    = $(UV) run --no-sync
SEED  ?= 0
ROOT  := $(shell [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && echo yes)

help: ## this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 18

.tools/bin/uv:
	python3 -m pip install --quiet --disable-pip-version-check --target .tools uv
	@echo '*' > .tools/.gitignore # else ruff lints uv's own Python files

$(READY): pyproject.toml uv.lock | $(filter .tools/%,$(UV))
	$(UV) sync --locked --extra $(EXTRA)
	@rm -f .venv/.ready-* && touch $@

demo: $(READY) ## train a small policy on this machine and watch it get better (SEED=0)
	$(RUN) etude demo --seed $(SEED)

USERS ?= 400

demo-realtime: $(READY) ## serve a small policy to simulated users, and train it on their feedback (SEED=0, USERS=400)
	$(RUN) python -m etude.demo.realtime --seed $(SEED) --users $(USERS) --json bench/out/realtime.json

SMOLLM2 ?= runs/smollm2
SMOLLM2_RUN ?= examples/smollm2/rlrun.yaml

smollm2: $(READY) ## train a real 135M model on this machine: fetch, convert, make tasks, run, summarise (SMOLLM2=FOLDER)
	$(RUN) python examples/smollm2/convert.py $(SMOLLM2)/inputs/etude/smollm2/model
	test -d $(SMOLLM2)/inputs/etude/demo || $(RUN) etude tasks generate $(SMOLLM2)/inputs/etude/demo --held-out 64
	$(RUN) etude run $(SMOLLM2_RUN) --dir $(SMOLLM2)
	$(RUN) python examples/smollm2/summary.py $(SMOLLM2) --serve

check: $(READY) ## format, lint, types, import rules; the wire where Node is, Go files where Go is
	$(RUN) ruff format --check .
	$(RUN) ruff check .
	$(RUN) mypy
	$(RUN) lint-imports
	.ci/buf --if-possible
	.ci/go

fix: $(READY) ## format and repair what can be repaired
	$(RUN) ruff format .
	$(RUN) ruff check --fix .

test: $(READY) ## unit and contract tests, and a real line through each part, in ten minutes (needs neither Go nor root)
	$(RUN) pytest -m "not long" --numprocesses=auto tests/unit tests/contract --ignore=tests/contract/chart
	$(RUN) pytest -m smoke --numprocesses=auto tests/integration tests/contract/chart

test-system: $(READY) $(if $(ROOT),system-deps) ## everything else short of test-long: clusters, VMs, chart, attacks, faults, many examples of each property (Go, root)
	$(RUN) python hack/testbed/build.py --if-possible
	$(RUN) pytest -m "hypothesis and not long" --hypothesis-profile=full --numprocesses=auto tests/unit tests/contract
	$(RUN) pytest -m "not long" --numprocesses=auto tests/contract/chart tests/cluster tests/operator_faults/test_crash_plans.py tests/integration tests/attacks

test-privacy: $(READY) ## redaction, consent, erasure and isolation of feedback against their goals: bench/out/privacy.json
	$(RUN) pytest tests/unit/feedback tests/unit/common/feedback tests/unit/common/test_turn_sealing.py tests/integration/feedback/test_sealed_turns.py
	$(RUN) python bench/privacy.py

test-gpu: $(READY) ## the kernels on a real GPU (EXTRA=gpu)
	ETUDE_REQUIRE=gpu $(RUN) pytest tests/gpu

test-long: $(READY) ## what takes longer: tests marked so, the demo on three seeds, kill -9 of each role, 1,000 versions, real engines
	$(RUN) python hack/minio.py --if-possible
	$(RUN) pytest -m long tests/unit tests/contract tests/integration tests/attacks tests/cluster
	$(RUN) pytest tests/e2e --timeout=3600
	$(RUN) python -m tests.harness.chaos

fuzz-frames: $(READY) ## 1,000,000 hostile frames at a node's parser, its channels and a live node, and more at the guest's agent (SEED=0)
	$(RUN) python -m tests.harness.fuzz --seed $(SEED)

chaos-weights: $(READY) ## 1,000 versions under faults on a folder and on MinIO, 100 on real engines; each check broken once
	$(RUN) python hack/minio.py --if-possible
	$(RUN) python -m tests.harness.chaos --seed $(SEED) --mutations

minio: $(READY) ## build a MinIO server, and run the object store's tests on it too (needs Go)
	$(RUN) python hack/minio.py
	ETUDE_REQUIRE=minio $(RUN) pytest tests/contract/test_store.py tests/contract/test_store_faults.py tests/contract/test_weights_stores.py tests/unit/cli/test_storage_verb.py

event-servers: $(READY) ## get servers of NATS and Kafka, and run the tests of relays on them (needs Go, Java 17 and Maven)
	$(RUN) python hack/event_servers.py
	ETUDE_REQUIRE=event-servers $(RUN) pytest tests/integration/feedback/relays

testbed: $(READY) ## build and start a real control plane and node, and run the cluster tests on it
	$(RUN) python hack/testbed/build.py
	ETUDE_REQUIRE=cluster $(RUN) pytest tests/cluster

# What shows what the operator does under faults and bad input. Each suite writes its figures into
# bench/out/faults.json by tests/support/figures.py. Crash plans take most of the time, and those that
# have reached their end are not tried again by the next call, unless the code has changed since:
# FRACTION=0.1 tries a tenth of them, SEED says which. MUTATIONS says how many manifests are changed, and
# SEED draws those too. Three processes: one for the crash plans, one for the other faults, one for what
# tests/cluster has.
FRACTION ?= 1
MUTATIONS ?= 1500
OPERATOR_SUITES = tests/cluster/test_mutations.py tests/cluster/test_rights_used.py tests/operator_faults
OPERATOR_FIGURES = crash_plans reached_reference mutations crashed rbac_unused rbac_missing

test-operator: $(READY) ## crash plans, faults of the API server, mutated manifests, used rights: bench/out/faults.json (SEED=0 FRACTION=1 MUTATIONS=1500)
	$(RUN) python hack/testbed/build.py
	@rm -f bench/out/faults.json
	ETUDE_REQUIRE=cluster SEED=$(SEED) ETUDE_CRASH_PLANS=$(FRACTION) ETUDE_MUTATIONS=$(MUTATIONS) \
	$(RUN) pytest -s -n 3 --no-loadscope-reorder $(OPERATOR_SUITES); \
	status=$$?; $(RUN) python -m tests.support.figures faults $(OPERATOR_FIGURES) && exit $$status

e2e: $(READY) ## a run on a real node from helm install to helm uninstall, its pods killed: a transcript with times (needs Go, root)
	$(RUN) python hack/testbed/build.py
	$(RUN) python hack/minio.py
	$(RUN) python -m tests.harness.e2e_cluster

e2e-realtime: $(READY) ## users' feedback becomes the next version on a real node: trained, evaluated, tried, promoted, rolled back (needs Go, root)
	$(RUN) python hack/testbed/build.py
	$(RUN) python hack/minio.py
	$(RUN) python -m tests.harness.e2e_realtime

microvms: $(READY) ## the tests of real microVMs, which nothing may skip (QEMU, Go, root)
	ETUDE_REQUIRE=qemu $(RUN) pytest tests/integration/qemu

test-env: $(READY) ## environments on every driver, with the attacks on them; skips nothing of ours but Firecracker's pool without KVM (QEMU, runsc, Go, root)
	ETUDE_REQUIRE=qemu $(RUN) pytest tests/unit/guest tests/contract/test_guest_agents.py tests/contract/test_workspaces.py tests/integration/envserver tests/integration/envaccess tests/integration/tasks tests/integration/qemu tests/integration/firecracker tests/integration/gvisor tests/attacks

protos: $(READY) ## regenerate the committed stubs
	$(RUN) python -m grpc_tools.protoc -Iprotos --python_out=protos --pyi_out=protos --grpc_python_out=protos --mypy_grpc_out=protos protos/etude/*/*.proto

docs: $(READY) ## regenerate CRDs and reference pages, and build the site into site/
	$(RUN) python -m etude.common.api.schema.crd
	$(RUN) python -m etude.common.api.schema.reference
	$(RUN) python -m etude.operator.commands.reason_reference
	$(RUN) python hack/metrics_reference.py
	$(RUN) python hack/dashboards.py
	$(RUN) python hack/decisions.py
	$(UV) run --isolated --locked --only-group docs zensical build --strict

chart-readme: $(READY) ## regenerate the chart's README from its values (needs Go)
	$(RUN) python hack/testbed/build.py
	$(RUN) python hack/chart_readme.py

# The first run of bench/weights.py trains a model for minutes, bench/env.py starts thousands of
# machines, bench/operator_scale.py thousands of pods, and bench/ledger.py needs ten minutes: they
# have targets of their own.
# The demo comes first: others replay the run that it makes.
bench: $(READY) ## one table of ratios per claim, but for those of the bench-… targets
	@for script in bench/demo.py $(sort $(filter-out bench/demo.py bench/demo_variants.py bench/learner.py bench/trl_comparison.py bench/oracles.py bench/weights.py bench/env.py bench/operator_scale.py bench/ledger.py bench/repos.py bench/task_images.py bench/task_stream.py bench/hacks.py bench/controller.py bench/async_speedup.py bench/packing.py,$(wildcard bench/*.py))); do $(RUN) python $$script || exit 1; done

bench-env: $(READY) ## environments against their goals: starts, forks, density, bursts, placements (QEMU, Go, root, idle)
	$(RUN) python hack/guest.py
	$(RUN) python bench/env.py
	$(RUN) python bench/placements.py

bench-weights: $(READY) ## what a policy version costs to move, against what others do (on an idle machine)
	$(RUN) python bench/weights.py

bench-autoscaler: $(READY) ## how long GPUs wait for environments under five ways to size a pool (simulated, a minute)
	$(RUN) python bench/autoscaler.py

bench-learner: $(READY) ## equal gradients of every form of a step, memory of head and blocks by token (CPU, minutes)
	$(RUN) python bench/learner.py

bench-trl: $(READY) ## a step and its rollouts beside TRL's, on the same 135M weights (CPU, idle, half an hour)
	$(UV) run --locked --inexact --extra $(EXTRA) --group bench python bench/trl_comparison.py

oracles: $(READY) ## gradients of each algorithm and correction against verl, TRL and OpenRLHF: bench/out/oracles.json (two minutes; installs them)
	$(RUN) python bench/oracles.py --seed $(SEED)

bench-ab: $(READY) ## A/B tests of checkpoints: false positives and power of each rule of stopping (simulated, half a minute)
	$(RUN) python bench/ab_power.py

bench-ledger: $(READY) ## the feedback ledger under load and kill -9: lost, counted twice, events a second (ten minutes, idle)
	$(RUN) python bench/ledger.py

bench-credit: $(READY) ## censored persistence against the truth, and the part of colluding users in an update (two minutes)
	$(RUN) python bench/feedback_credit.py

bench-branches: $(READY) ## branches of two tenants: gain on their own tasks, loss on everyone's, and the gate (simulated, half a minute)
	$(RUN) python bench/branches.py

bench-repos: $(READY) ## tasks mined from real projects of PyPI, npm, crates.io and Go: bench/out/repos.json (Node, Go, cargo, half an hour)
	$(RUN) python bench/repos.py

bench-toolchains: $(READY) ## Node, Java, Go and Rust in guests, 2 GB of build output: bench/out/toolchains.json (gVisor, QEMU, buildah, root, network, half an hour)
	$(RUN) python bench/toolchains.py

bench-images: $(READY) ## 200 images on a disk for 40: hits, evictions, time to the first tool call: bench/out/images.json (gVisor, QEMU, root, half an hour)
	$(RUN) python bench/task_images.py

bench-tasks: $(READY) ## a set of 10,000 rows: import, audit and start of a run against a tenth of it: bench/out/task_stream.json (minutes)
	$(RUN) python bench/task_stream.py

bench-groups: $(READY) ## one set-up and 16 forks against 16 set-ups: bench/out/groups.json (gVisor, QEMU, root, minutes)
	$(RUN) python bench/groups.py

bench-scale: $(READY) ## one run over several brokers, one killed under load: bench/out/scale.json (simulated nodes, idle, minutes)
	$(RUN) python bench/scale.py

bench-trainer: $(READY) ## the controller at 10,000 rollouts in flight, async against sync: bench/out/trainer.json (a small engine, idle, five minutes)
	$(RUN) python bench/controller.py
	$(RUN) python bench/packing.py
	$(RUN) python bench/async_speedup.py

bench-long-rollouts: $(READY) ## rollouts of a million tokens, in a process and by a worker, and a row of 64 k tokens on two ranks: bench/out/long_rollouts.json (driver Process, two minutes)
	$(RUN) python bench/long_rollouts.py
	$(RUN) python bench/long_rollouts.py --worker
	$(RUN) python bench/long_rollouts.py --context-parallel
	$(RUN) python bench/long_rollouts.py --prefix-hits

chaos-trainer: $(READY) ## 200 kills, 40 of processes of the real stack, 160 of controllers against one that was not killed: bench/out/chaos_trainer.json (goes on where it ended, an hour and a half)
	$(RUN) python bench/chaos_trainer.py

bench-demo-variants: $(READY) ## summaries and a length penalty learnt on tasks that do not fit a context, three seeds: bench/out/demo_variants.json (the real engine and learner, CPU, idle, a quarter of an hour)
	$(RUN) python bench/demo_variants.py

bench-resume: $(READY) ## lengths of trained rollouts after crashes: dropped, redrawn, continued: bench/out/trainer.json (simulated, a minute)
	$(RUN) python bench/resume_bias.py

bench-lending: $(READY) ## slots and engines of users lent to rollouts, in bursts of people: bench/out/lending.json (driver Process, two small engines, idle, six minutes)
	$(RUN) python bench/lending.py
	$(RUN) pytest -q --numprocesses=0 tests/integration/inference/test_lent_engines.py

bench-mtp: $(READY) ## guesses of a head of multi-token prediction on the real engine, with and without: bench/out/mtp.json (CPU, idle, five minutes)
	$(RUN) python bench/mtp.py

bench-sft: $(READY) ## held-out cross-entropy after SFT against the reward after RL, over a sweep: bench/out/sft_reward.json (CPU, minutes)
	$(RUN) python bench/sft_reward.py

bench-moe: $(READY) ## mismatch of the real engine and the learner with and without replayed routers: bench/out/moe.json (CPU, minutes)
	$(RUN) python bench/moe.py

bench-routing: $(READY) ## throughput, balance and prefix hits of 1 to 8 engines (simulated, a minute)
	$(RUN) python bench/routing.py

bench-gateway: $(READY) ## CPU and latency that gateways add to a turn, ours and three others (four minutes; installs the others)
	$(RUN) python bench/gateway.py

bench-monitors: $(READY) ## recall and false positives of the monitors, and two hacks that a policy learns (simulated, a minute)
	$(RUN) python bench/monitors.py

bench-hacks: $(READY) ## attacks on rewards with repairs off and on, and what detects them: bench/out/hacks.json (driver Process, ten minutes)
	$(RUN) python bench/hacks.py --seed $(SEED)

bench-operator: $(READY) ## runs a second, API writes, memory and restart of the operator (KWOK; Go, root, idle, ten minutes)
	$(RUN) python hack/testbed/build.py
	$(RUN) python bench/operator_scale.py

search-model: $(READY) ## train an encoder for code search on the Python code at hand: runs/search-model (five CPU minutes)
	PYTHONPATH=bench $(RUN) python -m search_bench.train --seed $(SEED)

bench-search: $(READY) ## questions that code search answers, with the encoder, BM25 and MiniLM: bench/out/search.json (after search-model)
	$(UV) run --locked --inexact --extra $(EXTRA) --extra search-minilm python bench/search.py

system-deps: ## Debian packages for the cluster and microVM tests, and gVisor (as root)
	bash hack/system-deps.sh

buf: ## lint the wire and look for breaking changes (needs Node)
	.ci/buf
