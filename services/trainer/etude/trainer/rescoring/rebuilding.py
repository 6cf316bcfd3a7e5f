"""Changes of recorded rollouts, made again by their calls in fresh environments.

Journals hold no diffs. A rollout's calls are run once more on the first files of its task, and must
have the results that the policy read.
"""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import grpc

from etude.agent.tool_calls import ToolCall
from etude.agent.tools.base import Access, Tool, ToolOutcome
from etude.agent.toolsets import toolset
from etude.agent.trajectory import cut_text
from etude.common.errors import EtudeError, UnavailableError
from etude.common.harbor.task_file import TaskFile
from etude.trainer.rollouts.client_pool import ClientPool
from etude.trainer.rollouts.environments import GroupEnvironments, RolloutEnvironments
from etude.trainer.rollouts.outage import OutageBudget
from etude.trainer.rollouts.protocol import GroupRequest, WorkerConfig
from etude.trainer.rollouts.sandbox_client import SandboxClient
from etude.trainer.rollouts.task_setup import SetupFailedError, TaskSetup
from etude.v1 import environments_pb2, rollout_pb2

ATTEMPTS = 3
"""Environments that are tried before a rollout counts as lost."""
_NO_EFFECT = frozenset({Access.READ, Access.TREE, Access.END})


class LeftOut(NamedTuple):
    """The rollout cannot be scored again, however often it is tried."""

    reason: str


class LostRebuild(NamedTuple):
    """The platform lost every attempt."""

    reason: str


class RecordedCall(NamedTuple):
    """A call that may have changed something, and its record."""

    call: ToolCall
    record: rollout_pb2.CallRecord


class _DifferentResultError(EtudeError):
    """A repeated call had another result."""

    reason = "ReplayDiverged"


def find_refusal(rollout: rollout_pb2.Rollout, settings: TaskFile) -> str:
    """The reason that a rollout's change cannot be made again; empty if there is none."""
    if settings.steps:
        return "its task has several steps, whose files are not among its calls"
    if settings.metadata.etude_grade == "fork":
        return "its task is graded in a fork of its environment, which has ended"
    if len(rollout.calls) < rollout.costs.tool_calls:
        return "its record was too large to keep its calls"
    return ""


def list_turns(
    calls: Sequence[rollout_pb2.CallRecord], tools: Mapping[str, type[Tool]]
) -> Iterator[list[RecordedCall]]:
    """List the calls that may have changed something, turn by turn.

    Args:
        calls: of a rollout, in order.
        tools: of its toolset, by name.
    """
    for turn, members in groupby(calls, key=lambda each: each.turn):
        effective = [
            RecordedCall(ToolCall(f"{turn}.{place}", each.name, each.arguments_json), each)
            for place, each in enumerate(members)
            if not each.is_malformed and each.name in tools
            if tools[each.name].access not in _NO_EFFECT
        ]
        if effective:
            yield effective


def check_results(turn: Sequence[RecordedCall], outcomes: Sequence[ToolOutcome]) -> None:
    """Compare the results of a turn with what the policy read, which records hold in part.

    Raises:
        _DifferentResultError: one differs.
    """
    for (call, record), outcome in zip(turn, outcomes, strict=True):
        now = cut_text(outcome.content)
        if (now, outcome.is_error) != (record.result, record.is_error):
            places = (i for i, (a, b) in enumerate(zip(record.result, now, strict=False)) if a != b)
            at = next(places, min(len(record.result), len(now)))
            raise _DifferentResultError(
                f"call {call.call_id} ({call.name}) had another result, from character {at} on"
                f" {now[at : at + 40]!r}, not {record.result[at : at + 40]!r}"
            )


@dataclass(slots=True, kw_only=True)
class ChangeRebuilder:
    """Makes the changes of rollouts again."""

    config: WorkerConfig
    clients: ClientPool
    nonce: str = field(default_factory=lambda: uuid.uuid4().hex[:12])

    async def rebuild(
        self, order: GroupRequest, settings: TaskFile, rollout: rollout_pb2.Rollout
    ) -> bytes | LeftOut | LostRebuild:
        """Make a rollout's change again; returns it as a WorkspaceDiff."""
        if rollout.ending == rollout_pb2.ENDING_CHANGE_TOO_LARGE:
            return b""  # which is why it has its reward
        if refusal := find_refusal(rollout, settings):
            return LeftOut(refusal)
        lost = LostRebuild("no environment was available")
        for attempt in range(ATTEMPTS):
            try:
                return await self._rebuild(order, settings, rollout, attempt)
            except (_DifferentResultError, SetupFailedError) as error:
                return LeftOut(str(error))
            except (EtudeError, grpc.aio.AioRpcError) as error:
                lost = LostRebuild(str(error))
        return lost

    async def _rebuild(
        self,
        order: GroupRequest,
        settings: TaskFile,
        rollout: rollout_pb2.Rollout,
        attempt: int,
    ) -> bytes:
        """Make one attempt.

        Raises:
            _DifferentResultError: a call had another result.
            SetupFailedError: the task's set-up fails.
            EtudeError: no environment was available, or it was lost.
            AioRpcError: its host refuses.
        """
        group = GroupEnvironments(
            order=order,
            config=self.config,
            clients=self.clients,
            nonce=self.nonce,
            image=settings.metadata.etude_image or "",
        )
        source = RolloutEnvironments(
            group,
            rollout.index,
            attempt,
            OutageBudget(self.config.outage_s),
            TaskSetup.of_task(settings.metadata),
        )
        lease = await self._lease(group, source)
        try:
            await source.set_up(lease)
            return await self._repeat(source.environment(lease), order, rollout)
        finally:
            group.leases.release([lease.lease_id])

    async def _lease(
        self, group: GroupEnvironments, source: RolloutEnvironments
    ) -> environments_pb2.Lease:
        """Lease an environment with the first files of the task.

        Raises:
            UnavailableError: there is none.
        """
        failure = "the broker gave no answer"
        async for launch in group.leases.launch(source.request(0)):
            if launch.lease is not None:
                return launch.lease
            failure = launch.failure
        raise UnavailableError(f"no environment: {failure}")

    async def _repeat(
        self, environment: SandboxClient, order: GroupRequest, rollout: rollout_pb2.Rollout
    ) -> bytes:
        tools = toolset(order.limits.toolset).tools
        for turn in list_turns(rollout.calls, tools):
            check_results(turn, await environment.run([each.call for each in turn]))
        return await environment.diff()
