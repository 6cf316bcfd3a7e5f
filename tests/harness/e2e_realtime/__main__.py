"""make e2e-realtime: users' feedback becomes the next version on a real node, in one pass.

Every part is a pod: trainer, engines, gateway, feedback service, evaluations. Users are processes
of this machine; see users.py for what is played. What is seen is printed with times and kept in
bench/out/e2e-realtime.txt; a pass that fails leaves logs, objects and events beside it.
"""

import sys

from tests.harness.e2e_cluster.install import install_the_chart
from tests.harness.e2e_cluster.stages import Stage, run_stages
from tests.harness.e2e_realtime import releases, route

STAGES: dict[str, Stage] = {
    "install the chart, with MinIO": install_the_chart,
    "fill the store": route.fill_the_store,
    "a run that waits for feedback": route.apply_the_run,
    "a route, and its first version": route.apply_the_route,
    "users work, and a window trains": releases.train_a_window,
    "gate, canary, promotion": releases.promote_a_candidate,
    "roll-back": releases.roll_it_back,
    "the objects of the cycle": releases.show_the_cycle,
}


if __name__ == "__main__":
    program = "python -m tests.harness.e2e_realtime"
    sys.exit(run_stages(program, __doc__, "e2e-realtime", STAGES))
