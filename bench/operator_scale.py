"""How fast the operator is, what it writes and what it holds, on a real API server with KWOK.

python bench/operator_scale.py [--runs N] [--pods N] [--kind sft|rl] [--only NAME …]

A control plane of its own (etcd, API server, controllers, scheduler; with GOGC=400, as on every
test bed of ours) and KWOK, which plays the kubelets; the operator is a process with the environment
and the account that the chart gives it. Every run's controller and every pool's broker is played by
one process of the bench, on the addresses of their pods, so runs get Ready, step, save and finish.
A run counts as reconciled when all its children were applied and its status says so
(observedGeneration), its own pool's too.

Writes are what the operator counts itself (etude_api_requests_total), without the leader's
renewals. A full run takes about ten minutes of two idle cores; nothing else should run.

Examples:
  make bench-operator                                    all of it, and bench/out/operator.json
  python bench/operator_scale.py --runs 50 --pods 500          a small one, in two minutes
  python bench/operator_scale.py --runs 200 --only runs        how fast runs come to be, alone
  python bench/operator_scale.py --runs 100 --only peer        beside a handler of kopf
  python bench/operator_scale.py --kind rl --runs 100 --only runs   runs with every role and a pool
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from operator_bench.command import main

if __name__ == "__main__":
    main(__doc__)
