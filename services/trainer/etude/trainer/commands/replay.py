"""`python -m etude.trainer.commands.replay RUN.json --step N`: train a recorded step again.

It prints one JSON object for each step from the checkpoint on, and writes nothing to the run.
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from etude.common.api.run.phases import inherit_context
from etude.common.errors import EtudeError, Problem, UserError
from etude.common.model_sources.run_model import find_run_model
from etude.common.process import root_causes
from etude.common.role_inputs import ResolvedRun, read_run
from etude.common.run_folder.record import open_record
from etude.common.store_urls import folder_of
from etude.common.stores import WEIGHT_SUFFIXES, local_folder, open_source
from etude.trainer.replay.history import read_history
from etude.trainer.settings import WORKER_ENV

if TYPE_CHECKING:
    from etude.trainer.replay.replayer import StepReplayer

HOLDER = "replay"
DIFFERS = 9
"""Exit code if a figure is not the recorded one: 1 is that of an error of the program itself."""


async def replay_run(run: ResolvedRun, *, step: int, scratch: Path) -> bool:
    """Replay up to a step and print each verdict; True if all figures are the recorded ones.

    Raises:
        EtudeError: the run has not what it takes, or its store does not answer.
    """
    from etude.trainer.replay.replayer import StepReplayer, copy_checkpoint  # noqa: PLC0415 - Ray is heavy

    storage = run.spec.storage
    store = open_source(storage.uri, storage)
    history = read_history(store, inherit_context(run.spec.phases), step=step)
    run = run.model_copy(update={"uid": history.run_uid})
    for problem in history.problems:
        _write({"skipped": problem})
    found = history.checkpoint
    _write({"from": 0 if found is None else found.manifest.step, "steps": len(history.steps)})
    states = scratch / "states"
    prefix = "" if found is None else copy_checkpoint(store, found, states)
    states.mkdir(exist_ok=True)
    replayer = partial(
        StepReplayer,
        history=history,
        record=open_record(store),
        prefix=prefix,
        source=store,
        states=open_source(states.as_uri(), storage),
    )
    return await _replay_on_ray(run, replayer, states=states, scratch=scratch)


async def _replay_on_ray(
    run: ResolvedRun, make: "Callable[..., StepReplayer]", *, states: Path, scratch: Path
) -> bool:
    """Start the ranks of the run over a folder of copied states, and replay on them."""
    from etude.trainer import ray_backend  # noqa: PLC0415 - Ray and its learners are heavy
    from etude.trainer.controller.inputs import Inputs, TaskSets  # noqa: PLC0415 - as above
    from etude.trainer.controller.lifecycle import learner_configs  # noqa: PLC0415 - as above

    folder, uri = _find_model(run, scratch)
    own = run.spec.storage.model_copy(update={"uri": states.as_uri()})
    moved = run.model_copy(update={"spec": run.spec.model_copy(update={"storage": own})})
    no_tasks = TaskSets(orders={}, evaluations={})
    inputs = Inputs(open_source(own.uri, own), folder, None, no_tasks, uri)
    for name, value in WORKER_ENV.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    ray_backend.start_ray(os.environ.get("RAY_ADDRESS") or None, WORKER_ENV)
    is_same = True
    try:
        learners = ray_backend.create_learners(
            learner_configs(HOLDER, moved, inputs),
            gpus_per_node=run.spec.roles.trainer.gpus_per_replica,
        )
        async for verdict in make(learners=learners).replay():
            is_same = is_same and verdict.is_same
            _write({**verdict.to_json(), "same": verdict.is_same})
    finally:
        ray_backend.stop_ray()
    return is_same


def _find_model(run: ResolvedRun, scratch: Path) -> tuple[Path, str]:
    """Local folder of the run's model, and the store of its weights if they are elsewhere.

    Raises:
        UserError: the model, or the run's copy of it, is gone.
    """
    storage = run.spec.storage
    uri = find_run_model(run.spec.model.key, open_source(storage.uri, storage))
    if uri is None:
        what, fix = "is no longer in the store of the run", "restore the copy of the model"
        raise UserError(Problem("NotFound", what, f"model.uri: {run.spec.model.key}", fix))
    folder = local_folder(uri, scratch, storage, leave_out=WEIGHT_SUFFIXES)
    return folder, "" if folder_of(uri) is not None else uri


def _write(row: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str]) -> int:
    """Replay; 0 if every step is the recorded one, 9 if not, 4 for what cannot be replayed."""
    parser = argparse.ArgumentParser(prog="python -m etude.trainer.commands.replay")
    parser.add_argument("run", type=Path, help="JSON file with the resolved run")
    parser.add_argument("--step", type=int, required=True, help="counted over all phases from 1")
    given = parser.parse_args(arguments)
    try:
        run = read_run(given.run)
        with TemporaryDirectory(prefix="etude-replay-") as scratch:
            is_same = asyncio.run(replay_run(run, step=given.step, scratch=Path(scratch)))
    except Exception as caught:
        cause = next(root_causes(caught))
        if not isinstance(cause, EtudeError):
            raise
        sys.stderr.write(f"{cause}\n")
        return 4
    return 0 if is_same else DIFFERS


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
