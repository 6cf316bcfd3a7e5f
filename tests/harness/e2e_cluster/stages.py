"""One pass through stages on a test bed, with its transcript, and evidence of one that fails."""

import argparse
import shutil
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from tests.harness.e2e_cluster import bed, evidence
from tests.harness.e2e_cluster.scene import HOME, LAB, Scene
from tests.harness.e2e_cluster.transcript import OUT, Transcript

Stage = Callable[[Scene], None]


def run_stages(
    program: str, description: str | None, name: str, stages: Mapping[str, Stage]
) -> int:
    """One pass; 0 if all of it held.

    Args:
        program: that was called.
        description: of it, for people.
        name: of the transcript and of the folder with evidence, in bench/out.
        stages: by their titles.
    """
    options = _parse_options(program, description)
    folder = OUT / name
    if not options.index:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    transcript = Transcript(OUT / f"{name}.txt")
    with ExitStack() as stack:
        with transcript.stage("start the test bed"):
            made = stack.enter_context(bed.up(keep=options.keep, index=options.index))
        scene = Scene(made, transcript, folder)
        stack.callback(scene.end)
        for title, stage in list(stages.items())[options.skip :]:
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


def _parse_options(program: str, description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("--keep", action="store_true", help="leave the cluster, to look at it")
    parser.add_argument("--index", help="go on with this cluster, which was left")
    parser.add_argument(
        "--skip", type=int, default=0, help="so many stages, which it has behind it"
    )
    return parser.parse_args()
