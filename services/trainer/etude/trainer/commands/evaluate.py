"""`python -m etude.trainer.commands.evaluate JOB.json`: an evaluation without a run.

It drives agents against engines that serve one version, environments of a pool and a reward
service, all of them started by others. Killed and started again, it goes on where it was.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NoReturn, Self
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, model_validator

from etude.agent.chat import ChatFormat
from etude.common.api.evaluation.spec import EvaluatedEndpoint
from etude.common.api.meta import Model, Name, Uri
from etude.common.api.run.phases import TaskSet
from etude.common.api.run.rollout_policy import RolloutPolicy
from etude.common.api.storage import Storage
from etude.common.blobs import ExistsError, Store
from etude.common.errors import EtudeError, Problem, UserError
from etude.common.run_folder.record import open_record
from etude.common.stores import WEIGHT_SUFFIXES, local_folder, open_run_store, open_source
from etude.common.tls.targets import is_loopback
from etude.common.weights import VersionId
from etude.trainer.controller.reporting.rows import Row, evaluation_fields
from etude.trainer.rollouts.contents.readable_rows import rollout_rows
from etude.trainer.rollouts.endpoint_policy import ChatEndpoint
from etude.trainer.rollouts.protocol import GroupRequest, WorkerConfig
from etude.trainer.rollouts.suites.results import SuiteResults
from etude.trainer.rollouts.suites.runner import Marks, Records, SuitePass, SuiteRunner
from etude.trainer.rollouts.tasks import find_tasks
from etude.trainer.rollouts.worker import RolloutWorker
from etude.trainer.routing.table import EngineState, RoutingTable
from etude.v1 import journal_pb2

log = logging.getLogger(__name__)

IDENTITY = "job.json"
SUMMARY = "result.json"
ENDPOINT_KEY = "ENDPOINT_API_KEY"
"""Environment variable with the bearer token of an endpoint."""
Target = Annotated[str, Field(min_length=1, max_length=512)]


class EvaluationJob(Model):
    """One policy on one suite: a version on engines, or a model at an endpoint."""

    name: Name
    """Of the evaluation; part of every rollout's id."""
    uid: Annotated[str, Field(min_length=1, max_length=64)]
    """Owner of its environments at the broker."""
    policy: Annotated[str, Field(pattern=r"^[0-9]{1,9}\.[0-9]{1,12}$")] | None = None
    """Version that the engines serve; rollouts that another one touched do not count."""
    model: Uri | None = None
    """Folder with the tokenizer."""
    endpoint: EvaluatedEndpoint | None = None
    """Model that answers in place of engines; its key is ENDPOINT_API_KEY."""
    tasks: TaskSet
    """The suite."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Tasks at most; all of them unless set."""
    samples: Annotated[int, Field(ge=1, le=64)] = 1
    """Rollouts of each task."""
    greedy: bool = False
    """Take the likeliest token, instead of sampling at temperature 1."""
    seed: int = 0
    """Seeds of all rollouts follow from it."""
    rollout: RolloutPolicy = RolloutPolicy()
    """Limits of a rollout."""
    engines: tuple[Target, ...] = ()
    """host:port of each engine."""
    broker: Target
    """host:port of the pool's broker."""
    template: Name
    """Template of the pool."""
    rewards: Target
    """host:port of the reward service."""
    reward_counts_tokens: bool = False
    """A reward function counts tokens: the rewards of an endpoint, which gives none, are left
    out."""
    score_timeout_seconds: Annotated[int, Field(ge=1)] = 600
    """Longest time of scoring one rollout."""
    outage_seconds: Annotated[int, Field(ge=1)] = 300
    """Longest wait for an engine, a broker or the store that does not answer."""
    storage: Storage
    """Prefix of the results, which nothing else uses."""

    def identity(self) -> bytes:
        """The fields that decide about results: no addresses and no waiting times."""
        fields: set[str] | dict[str, Any] = {
            "name",
            "policy",
            "model",
            "tasks",
            "limit",
            "samples",
            "greedy",
            "seed",
            "rollout",
        }
        if self.endpoint is not None:
            fields = dict.fromkeys(fields, True) | {"endpoint": {"url", "model"}}
        return self.model_dump_json(include=fields, by_alias=True).encode()

    @model_validator(mode="after")
    def _has_one_policy(self) -> Self:
        on_engines = [self.policy is not None, self.model is not None, bool(self.engines)]
        if any(on_engines) if self.endpoint is not None else not all(on_engines):
            raise ValueError("give policy, model and engines, or endpoint alone")
        return self


@dataclass(slots=True, kw_only=True)
class JobRunner:
    """Runs groups on a worker in this process; rollouts that are finished are not run again."""

    job: EvaluationJob
    worker: RolloutWorker
    results: SuiteResults
    finished: dict[str, journal_pb2.JournalRollout] = field(default_factory=dict)

    async def run_group(self, request: GroupRequest) -> list[journal_pb2.JournalRollout]:
        names = {index: request.rollout_id(index) for index in request.indices}
        known = [self.finished[name] for name in names.values() if name in self.finished]
        left = tuple(index for index, name in names.items() if name not in self.finished)
        if not left:
            return known
        engines = tuple((target, EngineState.LIVE) for target in self.job.engines)
        routing = RoutingTable(revision=1, engines=engines)
        answer = await self.worker.run_group(replace(request, indices=left, routing=routing))
        records = [journal_pb2.JournalRollout.FromString(data) for data in answer.records]
        await asyncio.to_thread(self.results.write, records)
        return known + records

    async def find_marked(self, records: Records) -> Marks:
        return self.results.find_marked(records)

    def report_redraw(self, marked: Marks) -> None:
        log.warning("%d rollouts are redrawn: other versions touched them", len(marked))


async def evaluate(job: EvaluationJob, *, key: str = "") -> Row:
    """Run or finish an evaluation; returns the content of result.json.

    Args:
        job: the evaluation.
        key: bearer token of its endpoint.

    Raises:
        UserError: the suite has no task, the model folder does not exist, another job has
            results at this prefix, or the endpoint refuses all requests.
        EtudeError: a store does not answer.
    """
    store = open_run_store(job.storage.uri, job.storage)
    await asyncio.to_thread(_check_identity, job, store)
    source = open_source(job.tasks.uri, job.storage)
    tasks = find_tasks(source, name=job.tasks.name, environment=job.tasks.environment)[: job.limit]
    results = SuiteResults(store=store, policy=VersionId.parse(job.policy) if job.policy else None)
    finished = await asyncio.to_thread(results.read)
    with TemporaryDirectory(prefix="etude-evaluation-") as scratch:
        model = _model_folder(job, Path(scratch))
        chat = None if model is None else ChatFormat.load(model)
        worker = RolloutWorker(_worker_config(job, model, key))
        runner = JobRunner(job=job, worker=worker, results=results, finished=finished)
        try:
            records = await SuiteRunner(
                run_group=runner.run_group,
                find_marked=runner.find_marked,
                on_redraw=runner.report_redraw,
            ).run(
                SuitePass(
                    prefix=f"eval-{job.name}",
                    tasks=tasks,
                    samples=job.samples,
                    temperature=0.0 if job.greedy else 1.0,
                    seed=job.seed,
                    limits=job.rollout,
                )
            )
        except ExceptionGroup as failed:
            # Groups run beside each other: the first error has ended the others.
            _raise_first(failed)
        finally:
            await worker.close()
    rows = [_remove_unmeasured(job, row) for row in rollout_rows(_sort(records), chat)]
    open_record(store).write_rollouts(0, f"eval-{job.name}", rows)
    summary = summarise(job, records)
    store.put(SUMMARY, json.dumps(summary, indent=2).encode())
    return summary


def _model_folder(job: EvaluationJob, scratch: Path) -> Path | None:
    """Local copy of the tokenizer's folder; None for an endpoint, which has one of its own."""
    if job.model is None:
        return None
    return local_folder(job.model, scratch, job.storage, leave_out=WEIGHT_SUFFIXES)


def _raise_first(failed: ExceptionGroup[Exception]) -> NoReturn:
    """Raise the first error of a group, which may hold groups."""
    error: Exception = failed
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    raise error from failed


def _remove_unmeasured(job: EvaluationJob, row: Row) -> Row:
    """A row without a reward of counted tokens, where an endpoint answered, which gives none."""
    if job.endpoint is None or not job.reward_counts_tokens:
        return row
    return {name: value for name, value in row.items() if name not in {"reward", "parts"}}


def _check_identity(job: EvaluationJob, store: Store) -> None:
    """Claim a prefix for a job, or find it claimed by an equal one.

    Raises:
        UserError: another job has results there.
    """
    with contextlib.suppress(ExistsError):
        store.create(IDENTITY, job.identity())
    if store.get(IDENTITY) != job.identity():
        what, fix = "holds the results of another job", "name a prefix of its own"
        raise UserError(Problem("Conflict", what, store.url, fix))


def summarise(job: EvaluationJob, records: Records) -> Row:
    """Figures of an evaluation; without figures if the platform lost every rollout."""
    scored = [each for each in records if each.reward.WhichOneof("result") == "reward"]
    figures = evaluation_fields(job.name, sampled=scored, greedy=[]) if scored else {}
    if job.endpoint is not None and job.reward_counts_tokens:
        figures.pop("reward_mean", None)
    return {
        "name": job.name,
        "policy": job.policy if job.endpoint is None else job.endpoint.model,
        "suite": job.tasks.uri,
        "samples": job.samples,
        "seed": job.seed,
        "lost": len(records) - len(scored),
        **figures,
    }


def _sort(records: Records) -> list[journal_pb2.JournalRollout]:
    return sorted(records, key=lambda each: (each.rollout.task_id, each.rollout.index))


def _worker_config(job: EvaluationJob, model: Path | None, key: str) -> WorkerConfig:
    environment, endpoint = job.tasks.environment, job.endpoint
    return WorkerConfig(
        run=job.uid,
        model_folder=model,
        endpoint=None if endpoint is None else _chat_endpoint(endpoint, key),
        brokers={environment: job.broker},
        templates={environment: job.template},
        rewards_target=job.rewards,
        score_timeout_s=job.score_timeout_seconds,
        storage=job.storage,
        outage_s=job.outage_seconds,
    )


def _chat_endpoint(endpoint: EvaluatedEndpoint, key: str) -> ChatEndpoint:
    """The endpoint with its key.

    Raises:
        UserError: the key would cross a network in the clear.
    """
    parts = urlsplit(endpoint.url)
    if (
        key
        and parts.scheme != "https"
        and not is_loopback(f"[{parts.hostname}]:{parts.port or 80}")
    ):
        fix = f"give an https url, or unset {ENDPOINT_KEY} where the endpoint needs no key"
        what = "would get its key unencrypted"
        raise UserError(Problem("TlsRequired", what, f"endpoint {endpoint.url}", fix))
    return ChatEndpoint(
        url=endpoint.url, model=endpoint.model, key=key, request_s=endpoint.request_seconds
    )


def read_job(path: Path) -> EvaluationJob:
    """The job in a file.

    Raises:
        UserError: the file cannot be read, or says something that is no job.
    """
    try:
        return EvaluationJob.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as cause:
        fix = "give a JSON file with the fields of EvaluationJob"
        raise UserError(Problem("InvalidSpec", f"is no job: {cause}", str(path), fix)) from cause


def main(arguments: Sequence[str]) -> int:
    """Evaluate; 0 if every rollout has a reward, 1 if some are lost, 4 for a wrong job."""
    parser = argparse.ArgumentParser(prog="python -m etude.trainer.commands.evaluate")
    parser.add_argument("job", type=Path, help="JSON file with the job")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    try:
        job = read_job(given.job)
        summary = asyncio.run(evaluate(job, key=os.environ.get(ENDPOINT_KEY, "")))
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return 4
    except EtudeError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(json.dumps(summary) + "\n")
    return 1 if summary["lost"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
