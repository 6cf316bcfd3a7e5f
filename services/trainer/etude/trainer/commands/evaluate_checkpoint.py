"""`python -m etude.trainer.commands.evaluate_checkpoint`: the program of an EvalRun's Job.

It pins the engines to the checkpoint's version, evaluates each suite, compares with the
baseline and hands the figures over. Killed and started again, it goes on where it was.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

from etude.common import process
from etude.common.api.checkpoint.spec import CheckpointSource
from etude.common.api.evaluation.spec import EvaluationSuite
from etude.common.api.evaluation.status import (
    EvaluationResult,
)
from etude.common.api.run.phases import TaskSet
from etude.common.blobs import MissingError
from etude.common.checkpoints.job import EXIT_CORRUPT, verify_checkpoint
from etude.common.errors import CorruptError, EtudeError, Problem, UnavailableError, UserError
from etude.common.model_sources.run_model import with_model_folder
from etude.common.pools.broker_shards import brokers_by_environment
from etude.common.role_inputs import ResolvedEvaluation, read_evaluation
from etude.common.stores import open_run_store
from etude.common.weights import VersionId, accepted_chain
from etude.trainer.commands.evaluate import ENDPOINT_KEY, EvaluationJob, evaluate
from etude.trainer.commands.evaluation_result import (
    RESULT,
    describe_suite,
    find_baseline_policy,
    overall_verdict,
    result_message,
    suite_storage,
)
from etude.trainer.controller.reporting.rows import Row
from etude.trainer.rollouts.pinned_engine import PinnedEngine

log = logging.getLogger(__name__)

PASSES = 3
"""Passes over a suite while the platform loses rollouts; only those that are lost are repeated."""
LEASE_S = 300
"""Longest wait for an environment to grade in, beside the grading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Files and partners of the program."""

    evaluation_file: Path
    result_file: Path
    """Termination message of the container."""
    engines: tuple[str, ...]
    """host:port of each engine."""
    rewards: str
    """host:port of the reward service."""
    brokers: Mapping[str, str]
    """Brokers of each environment, by its name: host:port, or several with commas."""
    endpoint_key: str = field(default="", repr=False)
    """Bearer token of an endpoint; empty for none."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Self:
        """Read the settings.

        Raises:
            KeyError: names a variable that is not set.
            ValueError: names a variable that is invalid.
        """
        return cls(
            evaluation_file=Path(env["ETUDE_EVALUATION_FILE"]),
            result_file=Path(env["ETUDE_RESULT_FILE"]),
            engines=tuple(filter(None, env["ETUDE_INFERENCE_TARGETS"].split(","))),
            rewards=env["ETUDE_REWARDS_TARGET"],
            brokers=brokers_by_environment(env["ETUDE_BROKERS"]),
            endpoint_key=env.get(ENDPOINT_KEY, ""),
        )


class _Policy(NamedTuple):
    """The evaluated version, and the SHA-256 of its manifest."""

    version: VersionId
    digest: bytes


async def run_evaluation(order: ResolvedEvaluation, settings: Settings) -> EvaluationResult:
    """Run or finish the evaluation; its result is stored too.

    Raises:
        UserError: a suite has no task, or the run has the checkpoint's version no more.
        CorruptError: checkpoint, engine or stored results are damaged.
        UnavailableError: a partner does not answer, or too many rollouts are lost.
    """
    if order.checkpoint is None:
        figures = await _evaluate_suites(order, None, settings)
        return await asyncio.to_thread(_store_result, order, None, figures)
    policy = await asyncio.to_thread(_find_policy, order, order.checkpoint)
    run = await asyncio.to_thread(with_model_folder, order.run)
    order = order.model_copy(update={"run": run})
    async with contextlib.AsyncExitStack() as pins:
        engines = (
            PinnedEngine(target=each, version=policy.version, digest=policy.digest)
            for each in settings.engines
        )
        await asyncio.gather(*(pins.enter_async_context(each.pin()) for each in engines))
        figures = await _evaluate_suites(order, policy.version, settings)
    return await asyncio.to_thread(_store_result, order, policy, figures)


async def _evaluate_suites(
    order: ResolvedEvaluation, version: VersionId | None, settings: Settings
) -> list[Row]:
    """Figures of all suites, one after the other.

    Raises:
        EtudeError: as `_evaluate_suite`.
    """
    jobs = [suite_job(order, each, version, settings) for each in order.spec.suites]
    return [await _evaluate_suite(job, settings.endpoint_key) for job in jobs]


def _find_policy(order: ResolvedEvaluation, source: CheckpointSource) -> _Policy:
    """The version that the checkpoint names.

    Raises:
        UserError: the run has left that version behind.
        CorruptError: the checkpoint is not the registered one.
    """
    storage = order.run.spec.storage
    checkpoint = verify_checkpoint(
        open_run_store(source.uri, storage), source.manifest_digest, depth="Manifest"
    )
    store = open_run_store(storage.uri, storage)
    chain = accepted_chain(store)
    version = next((each for each in chain if each.number == checkpoint.policy_version), None)
    try:
        manifest = None if version is None else store.get(version.manifest_key)
    except MissingError:
        manifest = None
    if version is None or manifest is None:
        what = f"is of policy version {checkpoint.policy_version}, which the run has no more"
        fix = "name a newer checkpoint; the run was put back, or its versions were deleted"
        raise UserError(Problem("NotFound", what, f"checkpoint {source.uri}", fix))
    return _Policy(version, hashlib.sha256(manifest).digest())


async def _evaluate_suite(job: EvaluationJob, key: str) -> Row:
    """Figures of one suite.

    Raises:
        UserError: the endpoint refuses all requests.
        UnavailableError: the platform lost too many rollouts, after all passes.
    """
    summary = await evaluate(job, key=key)
    for _ in range(1, PASSES):
        if not summary["lost"]:
            break
        log.warning("suite %s: %d rollouts are lost and repeated", job.name, summary["lost"])
        summary = await evaluate(job, key=key)
    lost, scored = summary["lost"], summary.get("count", 0)
    if 100 * lost > job.rollout.max_infra_failure_percent * (lost + scored):
        what = f"the platform lost {lost} of {lost + scored} rollouts"
        raise UnavailableError(f"suite {job.name}: {what}")
    return summary


def _store_result(
    order: ResolvedEvaluation, policy: _Policy | None, figures: Sequence[Row]
) -> EvaluationResult:
    """The result of all suites, stored next to theirs."""
    suites = tuple(
        describe_suite(order, suite, row)
        for suite, row in zip(order.spec.suites, figures, strict=True)
    )
    result = EvaluationResult(
        policy="" if policy is None else str(policy.version),
        manifest_digest="" if policy is None else policy.digest.hex(),
        baseline_policy=find_baseline_policy(order),
        suites=suites,
        verdict=overall_verdict([each.verdict for each in suites]),
    )
    text = result.model_dump_json(by_alias=True, exclude_none=True, indent=1)
    open_run_store(order.results, order.run.spec.storage).put(RESULT, text.encode())
    return result


def suite_job(
    order: ResolvedEvaluation, suite: EvaluationSuite, version: VersionId | None, settings: Settings
) -> EvaluationJob:
    """The evaluation of one suite, with results at a prefix of its own."""
    spec, run = order.spec, order.run.spec
    templates = {each.name: each.template for each in spec.environments}
    return EvaluationJob(
        name=suite.name,
        uid=order.uid,
        policy=None if version is None else str(version),
        model=None if version is None else run.model.folder,
        endpoint=spec.endpoint,
        tasks=TaskSet(name=suite.name, uri=suite.uri, environment=suite.environment),
        limit=suite.limit,
        samples=spec.samples,
        greedy=spec.greedy,
        seed=spec.seed,
        rollout=spec.rollout,
        engines=() if version is None else settings.engines,
        broker=settings.brokers[suite.environment],
        template=templates[suite.environment],
        rewards=settings.rewards,
        reward_counts_tokens=_counts_tokens(order),
        score_timeout_seconds=_score_timeout_s(order),
        storage=suite_storage(order, order.results, suite.name),
    )


def _score_timeout_s(order: ResolvedEvaluation) -> int:
    """Longest time of scoring one rollout: of its lease, and of the tests."""
    rewards = order.run.spec.roles.rewards
    functions = () if rewards is None else rewards.functions
    return LEASE_S + sum(each.limit_s for each in functions if each.function == "Verifier")


def _counts_tokens(order: ResolvedEvaluation) -> bool:
    rewards = order.run.spec.roles.rewards
    return rewards is not None and any(f.function == "LengthPenalty" for f in rewards.functions)


async def _run(settings: Settings) -> None:
    """Run the evaluation until it is done or SIGTERM comes; leases are released in both cases.

    Raises:
        UnavailableError: SIGTERM ended it.
    """
    order = read_evaluation(settings.evaluation_file)
    stop = asyncio.Event()
    with process.shutdown_signals(stop):
        running = asyncio.create_task(run_evaluation(order, settings), name="evaluation")
        stopping = asyncio.create_task(stop.wait(), name="stop")
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not running.done():
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
            raise UnavailableError("was told to end; it goes on when it is started again")
        settings.result_file.write_text(result_message(running.result()), encoding="utf-8")


def main() -> int:
    """Evaluate; 78 for what a repetition would not cure, 65 for damaged data, 75 for the rest."""
    process.start_process()
    settings = process.read_settings("evaluate-checkpoint", Settings.from_env)
    try:
        asyncio.run(_run(settings))
    except UserError as error:
        return _fail(error, process.EXIT_CONFIGURATION)
    except CorruptError as error:
        return _fail(error, EXIT_CORRUPT)
    except EtudeError as error:
        return _fail(error, process.EXIT_TRY_AGAIN)
    return 0


def _fail(error: EtudeError, code: int) -> int:
    sys.stderr.write(f"{error}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
