"""make e2e: a run on a real node from installation to uninstallation, in one pass.

What is seen is printed with times and kept in bench/out/e2e.txt. A pass that fails exits with 1 and
leaves logs, objects and events in bench/out/e2e/.
"""

import sys

from tests.harness.e2e_cluster import install, kills, leaving, suspension, upgrade, weights
from tests.harness.e2e_cluster.stages import Stage, run_stages

STAGES: dict[str, Stage] = {
    "install the chart, with MinIO": install.install_the_chart,
    "fill the store": install.fill_the_store,
    "kubectl apply, and train through the phases": install.apply_the_run,
    "every role is a pod": install.see_every_role_as_a_pod,
    "deltas through MinIO": weights.see_deltas_through_minio,
    "kill the trainer's pod": kills.kill_the_trainer,
    "kill the engine's pod": kills.kill_the_engine,
    "kill the node daemon's pod": kills.kill_the_node_daemon,
    "helm upgrade while the run trains": upgrade.upgrade_the_chart,
    "suspend": suspension.suspend,
    "resume, and train to the end": suspension.resume,
    "uninstall the chart": leaving.uninstall,
    "install it again": leaving.install_again,
    "delete the run": leaving.delete_the_run,
}


if __name__ == "__main__":
    sys.exit(run_stages("python -m tests.harness.e2e_cluster", __doc__, "e2e", STAGES))
