"""`python -m etude.trainer.commands.rescore JOB.json`: score recorded rollouts by another rubric.

It prints a JSON object for each group, and the summary last. It writes nothing to the run. Killed
and started again, it goes on where it was.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from etude.common.api.meta import Model
from etude.common.api.run.phases import inherit_context
from etude.common.errors import EtudeError, Problem, UserError
from etude.common.process import root_causes
from etude.common.role_inputs import ResolvedRun
from etude.common.stores import open_source
from etude.trainer.rescoring.rebuilding import ChangeRebuilder
from etude.trainer.rescoring.recorded_groups import read_trained_groups
from etude.trainer.rescoring.rescorer import GroupRescorer
from etude.trainer.rescoring.results import RescoreResults, Row, summarise
from etude.trainer.rollouts.client_pool import ClientPool
from etude.trainer.rollouts.protocol import WorkerConfig
from etude.trainer.rollouts.scoring import Scorer

LEASE_S = 300
"""Longest wait for an environment to grade in, on top of the grading."""
Target = Annotated[str, Field(min_length=1, max_length=512)]


class RescoreJob(Model):
    """Some steps of a run, and a rubric for their rollouts."""

    run: ResolvedRun
    """Run with the new rubric in place of its own."""
    brokers: dict[str, Target]
    """Broker of each environment."""
    rewards: Target
    """host:port of a reward service with the new rubric."""
    results: Path
    """Folder of the results."""
    first_step: Annotated[int, Field(ge=1)] = 1
    """Counted over all phases."""
    last_step: Annotated[int, Field(ge=1)] | None = None
    """The newest unless set."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Groups at most, the first ones; all of them unless set."""
    parallel: Annotated[int, Field(ge=1, le=1_024)] = 4
    """Groups at a time."""
    outage_seconds: Annotated[int, Field(ge=1)] = 300
    """Longest wait for a service that does not answer."""

    def identity(self) -> bytes:
        """Run and rubric, which decide about results, as bytes."""
        rewards = self.run.spec.roles.rewards
        functions = [] if rewards is None else [each.to_json() for each in rewards.functions]
        storage = self.run.spec.storage.uri
        return json.dumps({"storage": storage, "functions": functions}, sort_keys=True).encode()


async def rescore(job: RescoreJob) -> Row:
    """Score the rollouts of a job again; returns its summary, which is stored too.

    Raises:
        UserError: the steps have no rollouts, or the folder has other results.
        EtudeError: a store does not answer, or the journal is damaged.
    """
    spec = job.run.spec
    store = open_source(spec.storage.uri, spec.storage)
    groups = await asyncio.to_thread(
        read_trained_groups,
        store,
        inherit_context(spec.phases),
        first=job.first_step,
        last=job.last_step,
    )
    groups = groups[: job.limit]
    results = RescoreResults(job.results)
    results.claim(job.identity())
    config = _worker_config(job)
    clients = ClientPool(config)
    rescorer = GroupRescorer(
        source=store,
        rebuilder=ChangeRebuilder(config=config, clients=clients),
        scorer=Scorer(clients.reward_stub(), config.score_timeout_s, config.outage_s),
        results=results,
        storage=spec.storage,
        parallel=job.parallel,
    )
    rows: list[Row] = []
    done = 0
    try:
        async for scored in rescorer.rescore(groups, results.read()):
            rows += scored
            done += 1
            _write({"groups": done, "of": len(groups), **_counts(rows)})
    finally:
        await clients.close()
    summary = summarise(sorted(rows, key=lambda row: (row["step"], row["rollout_id"])))
    results.write_summary(summary)
    return summary


def _worker_config(job: RescoreJob) -> WorkerConfig:
    spec = job.run.spec
    functions = () if spec.roles.rewards is None else spec.roles.rewards.functions
    limits = sum(each.limit_s for each in functions if each.function == "Verifier")
    return WorkerConfig(
        run=job.run.uid,
        model_folder=None,
        brokers=job.brokers,
        templates={role.name: role.template for role in spec.roles.environments},
        rewards_target=job.rewards,
        score_timeout_s=limits + LEASE_S,
        storage=spec.storage,
        outage_s=job.outage_seconds,
    )


def _counts(rows: Sequence[Row]) -> Row:
    names = {"scored": "new_reward", "left_out": "left_out", "lost": "fault"}
    return {name: sum(key in row for row in rows) for name, key in names.items()}


def _write(row: Row) -> None:
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


def _read_job(path: Path) -> RescoreJob:
    """Read a job.

    Raises:
        UserError: the file is missing or is no valid job.
    """
    try:
        return RescoreJob.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as cause:
        what, fix = f"cannot be read as RescoreJob: {cause}", "give the file of etude rescore"
        raise UserError(Problem("InvalidSpec", what, str(path), fix)) from cause


def main(arguments: Sequence[str]) -> int:
    """Score again; 0 if every rollout was scored or left out, 1 if some were lost, 4 if refused."""
    parser = argparse.ArgumentParser(prog="python -m etude.trainer.commands.rescore")
    parser.add_argument("job", type=Path, help="JSON file with the job")
    given = parser.parse_args(arguments)
    try:
        summary = asyncio.run(rescore(_read_job(given.job)))
    except Exception as caught:
        cause = next(root_causes(caught))
        if not isinstance(cause, EtudeError):
            raise
        sys.stderr.write(f"{cause}\n")
        return 4
    _write({"summary": summary})
    return 1 if summary["lost"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
