"""Rollout worker: runs and scores groups of rollouts on one event loop."""

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from etude.agent.chat import ChatFormat
from etude.agent.chat.native_form import find_native_form
from etude.agent.rollout import first_prompt
from etude.agent.summaries import TOOL_NAME, SummarizeContext
from etude.agent.toolsets import Toolset, toolset
from etude.common import telemetry
from etude.common.api.run.rollout_policy import RolloutPolicy
from etude.common.blobs import MissingError
from etude.common.errors import CorruptError, StoreError, UserError
from etude.common.harbor import task_file
from etude.common.harbor.task_file import TaskFile
from etude.common.stores import find_model_folder, open_run_store
from etude.trainer.rollouts import task_steps
from etude.trainer.rollouts.client_pool import ClientPool
from etude.trainer.rollouts.contents.content_writer import ContentWriter
from etude.trainer.rollouts.contents.readable_rows import write_readable_rollouts
from etude.trainer.rollouts.endpoint_policy import EndpointClient
from etude.trainer.rollouts.environments import GroupEnvironments
from etude.trainer.rollouts.group_runner import GroupRunner
from etude.trainer.rollouts.group_start import GroupStart
from etude.trainer.rollouts.leases import GroupSlots, RolloutSlots
from etude.trainer.rollouts.protocol import GroupRequest, GroupResult, WorkerConfig
from etude.trainer.rollouts.scoring import Scorer
from etude.trainer.rollouts.task_setup import TaskSetup
from etude.trainer.rollouts.task_steps import StepContent
from etude.trainer.rollouts.trajectories.worker_trajectories import WorkerTrajectories
from etude.trainer.routing.router import Router
from etude.trainer.routing.table import Loads, RoutingUpdate
from etude.v1 import environments_pb2, journal_pb2, rollout_pb2

UPCOMING_GROUPS = 2
"""Groups of a worker that are prepared while earlier ones hold all of its slots."""
RETRY_S = 1.0
"""Pause before a failed read of the store is retried."""
CANCELLED = GroupResult((), 0, "", environments_pb2.ISOLATION_UNSPECIFIED)
"""Result of a group that was cancelled."""
_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class _RunningGroup:
    """A group that this worker runs."""

    environments: GroupEnvironments
    task: asyncio.Task[GroupResult]
    is_cancelled: bool = False
    """True if it was cancelled here, and not with the call that runs it."""

    def cancel(self) -> None:
        self.is_cancelled = True
        self.task.cancel()


class RolloutWorker:
    """Runs groups of rollouts on one event loop; a plain class that Ray may wrap."""

    def __init__(self, config: WorkerConfig) -> None:
        self._traces = telemetry.setup_tracing(
            "etude-trainer",
            otlp_endpoint=config.otlp_endpoint,
            traces_file=config.traces_file,
        )
        self.config = config
        self._chat = _open_chat(config)
        self._toolsets: dict[tuple[str, str, bool], Toolset] = {}
        self._slots = RolloutSlots()
        self._clients = ClientPool(config)
        self._router = Router()
        self._upcoming = asyncio.Semaphore(UPCOMING_GROUPS)
        self._nonce = uuid.uuid4().hex[:12]
        self._trajectories = WorkerTrajectories(config.run, config.storage)
        self._writing = asyncio.Lock()
        self._contents = _open_contents(config, self._chat)
        self._running: list[_RunningGroup] = []

    async def run_group(self, order: GroupRequest) -> GroupResult:
        """Run and score the siblings of a request; platform faults are retried, then masked.

        Raises:
            CancelledError: the call was cancelled.
        """
        self._router.use_table(order.routing)
        self._slots.resize(order.share or order.limits.max_concurrent)
        environments = GroupEnvironments(
            order=order, config=self.config, clients=self._clients, nonce=self._nonce
        )
        with telemetry.continue_trace(order.trace):
            task = asyncio.create_task(self._run_group(environments), name=order.group_id)
        running = _RunningGroup(environments, task)
        self._running.append(running)
        try:
            return await task
        except asyncio.CancelledError:
            if running.is_cancelled:
                return CANCELLED
            raise
        finally:
            self._running.remove(running)

    async def cancel_group(self, group_id: str, *, is_dropped: bool) -> None:
        """Cancel what runs of a group; its result is not read.

        Args:
            group_id: of the group.
            is_dropped: True if its rollouts have no successor.
        """
        for running in self._running:
            if running.environments.order.group_id == group_id:
                running.environments.is_dropped = is_dropped
                running.cancel()

    async def _run_group(self, environments: GroupEnvironments) -> GroupResult:
        order = environments.order
        start = GroupStart(
            environments=environments, setup=TaskSetup(), outage_s=self.config.outage_s
        )
        runner = GroupRunner(
            order=order,
            config=self.config,
            chat=self._chat,
            tools=self._tools(order.limits),
            slots=GroupSlots(self._slots),
            clients=self._clients,
            environments=environments,
            router=self._router,
            start=start,
            upcoming=self._upcoming,
            history=self._trajectories.history(order),
        )
        try:
            settings = await self._task_settings(order)
            runner.steps = await self._retry_read(partial(self._read_steps, order, settings))
            instruction = await self._instruction(order, runner.steps)
            metadata = settings.metadata
            environments.image = metadata.etude_image or ""
            start.setup = TaskSetup.of_task(metadata)
            runner.saves_end_state = metadata.etude_grade == "fork"
        except (MissingError, StoreError, CorruptError, UserError) as error:
            records = await self._score(order, runner.mask_all(f"{order.task_uri}: {error}"))
        else:
            try:
                # Hidden tests run on what the set-up left: its snapshot stays until then.
                records = await self._score(order, await runner.run(instruction))
            finally:
                runner.slots.close()
                await start.close()
        repeats = 0 if self._contents is None else await self._contents.write(order, records)
        runner.history.close(map(order.rollout_id, order.indices))
        return _build_result(runner, start, records)._replace(content_repeats=repeats)

    async def _score(
        self, order: GroupRequest, rollouts: Sequence[rollout_pb2.Rollout]
    ) -> list[journal_pb2.JournalRollout]:
        scorer = Scorer(
            self._clients.reward_stub(), self.config.score_timeout_s, self.config.outage_s
        )
        return await scorer.score(order, rollouts)

    def _read_steps(self, order: GroupRequest, settings: TaskFile) -> Sequence[StepContent]:
        store = open_run_store(order.task_uri, self.config.storage)
        return task_steps.read_steps(store, settings.steps)

    async def _instruction(self, order: GroupRequest, steps: Sequence[StepContent]) -> str:
        """Read the task's instruction, or its first step's; it must leave room for a completion.

        Raises:
            CorruptError: it is not text.
        """
        if steps:
            instruction = steps[0].instruction
        else:
            data = await self._read_with_retry(order.task_uri, "instruction.md")
            try:
                instruction = data.decode().strip()
            except UnicodeDecodeError as cause:
                raise CorruptError(f"instruction.md is not UTF-8: {cause}") from cause
        limits = order.limits
        if isinstance(self._chat, ChatFormat):
            tools, most = self._tools(limits), order.bound_rollout(used_s=0.0).opening_tokens
            first_prompt(self._chat, tools, instruction, max_tokens=most)
        return instruction

    def _tools(self, limits: RolloutPolicy) -> Toolset:
        """The toolset in the form that the policy is shown; found once for each."""
        sums_up = limits.summaries is not None
        key = (limits.toolset, limits.tool_format, sums_up)
        if key not in self._toolsets:
            tools = toolset(limits.toolset)
            if sums_up:
                tools = tools.with_tool(TOOL_NAME, SummarizeContext)
            if limits.tool_format == "Native" and isinstance(self._chat, ChatFormat):
                tools = tools.with_form(find_native_form(self._chat, tools.schemas()))
            self._toolsets[key] = tools
        return self._toolsets[key]

    async def _task_settings(self, order: GroupRequest) -> TaskFile:
        """Read the task's settings.

        Raises:
            CorruptError: the task's settings cannot be read.
        """
        data = await self._read_with_retry(order.task_uri, "task.toml")
        try:
            return task_file.parse_task_file(data.decode())
        except ValueError as cause:
            raise CorruptError(f"task.toml: {cause}") from cause

    async def _read_with_retry(self, task_uri: str, name: str) -> bytes:
        store = open_run_store(task_uri, self.config.storage)
        return await self._retry_read(partial(store.get, name))

    async def _retry_read(self, read: Callable[[], _T]) -> _T:
        """Read in a thread, again while the store does not answer.

        Raises:
            StoreError: it does not answer for the limit of an outage.
        """
        waited_s = 0.0
        while True:
            try:
                return await asyncio.to_thread(read)
            except StoreError:
                if waited_s > self.config.outage_s:
                    raise
                await asyncio.sleep(RETRY_S)
                waited_s += RETRY_S

    async def write_rollouts(self, step: int, split: str, records: Sequence[bytes]) -> None:
        """Write finished rollouts for people, one call at a time."""
        chat = self._chat if isinstance(self._chat, ChatFormat) else None
        store = open_run_store(self.config.storage.uri, self.config.storage)
        async with self._writing:
            await asyncio.to_thread(write_readable_rollouts, store, chat, step, split, records)

    async def update_routing(self, update: RoutingUpdate) -> Loads:
        """Take the engines and the loads of other workers; return this worker's loads."""
        return self._router.update(update)

    async def drop_rollouts(self, rollout_ids: Sequence[str]) -> None:
        """Let the records of rollouts go that were cancelled, and are dropped or drawn again."""
        self._trajectories.drop(rollout_ids)

    async def ping(self) -> None:
        """Answer once the worker has started."""

    async def close(self) -> None:
        """Leave rollouts that run to a successor, close channels, and send the last trace spans."""
        for running in self._running:
            running.cancel()
        await asyncio.gather(*(each.task for each in self._running), return_exceptions=True)
        await self._clients.close()
        await self._trajectories.close()
        if isinstance(self._chat, EndpointClient):
            self._chat.close()
        await asyncio.to_thread(self._traces.shutdown)


def _build_result(
    runner: GroupRunner, start: GroupStart, records: Sequence[journal_pb2.JournalRollout]
) -> GroupResult:
    return GroupResult(
        records=tuple(record.SerializeToString() for record in records),
        retried=runner.retried,
        driver=runner.driver,
        isolation=runner.isolation,
        lost=runner.tally.lost,
        recovered=runner.tally.recovered,
        replayed=runner.tally.replayed,
        starts=start.counts,
        completions=runner.completions,
        resumes=runner.history.counts,
    )


def _open_contents(config: WorkerConfig, chat: ChatFormat | EndpointClient) -> ContentWriter | None:
    """Writer of contents; None if records keep them, as those of endpoints, which have none."""
    if not config.stores_contents or isinstance(chat, EndpointClient):
        return None
    store = open_run_store(config.storage.uri, config.storage)
    return ContentWriter(store=store, vocab_size=chat.vocab_size)


def _open_chat(config: WorkerConfig) -> ChatFormat | EndpointClient:
    """The format of conversations on engines, or the client of an endpoint.

    Raises:
        ValueError: the configuration names neither.
    """
    if config.endpoint is not None:
        return EndpointClient(config.endpoint)
    if config.model_folder is None:
        raise ValueError("neither model_folder nor endpoint")
    return ChatFormat.load(find_model_folder(config.model_folder, config.model_uri, config.storage))
