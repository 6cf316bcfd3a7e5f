"""make e2e: a run on a real node from installation to uninstallation, in one pass.

What is seen is printed with times and kept in bench/out/e2e.txt. A pass that fails exits with 1 and
leaves logs, objects and events in bench/out/e2e/.
"""

import argparse
import shutil
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack

from tests.harness.e2e_cluster import (
    bed,
    evidence,
    install,
    kills,
    leaving,
    suspension,
    upgrade,
    weights,
)
from tests.harness.e2e_cluster.scene import HOME, LAB, Scene
from tests.harness.e2e_cluster.transcript import OUT, Transcript

Stage = Callable[[Scene], None]
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


def main() -> int:
    """One pass; 0 if all of it held."""
    options = _options()
    folder = OUT / "e2e"
    if not options.index:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    transcript = Transcript(OUT / "e2e.txt")
    with ExitStack() as stack:
        with transcript.stage("start the test bed"):
            made = stack.enter_context(bed.up(keep=options.keep, index=options.index))
        scene = Scene(made, transcript, folder)
        stack.callback(scene.end)
        for title, stage in list(STAGES.items())[options.skip :]:
            try:
                with transcript.stage(title):
                    stage(scene)
            except Exception:  # noqa: BLE001 - whatever it was, the logs are what helps
                transcript.say(f"FAILED\n{traceback.format_exc()}")
                evidence.collect(made, folder, (HOME, LAB))
                transcript.say(f"logs, objects and events are in {folder.relative_to(bed.ROOT)}")
                return 1
    transcript.table()
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.harness.e2e_cluster", description=__doc__
    )
    parser.add_argument("--keep", action="store_true", help="leave the cluster, to look at it")
    parser.add_argument("--index", help="go on with this cluster, which was left")
    parser.add_argument(
        "--skip", type=int, default=0, help="so many stages, which it has behind it"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
