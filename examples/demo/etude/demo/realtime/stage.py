"""The stage of an act: a run that trains, a route that serves, users who come, clients who stay."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import openai

from etude.cli.releases.client import DecisionText, ReleaseClient
from etude.common.errors import Problem, UserError
from etude.common.release.channels import STABLE
from etude.common.weights import VersionId
from etude.demo.realtime import serving, warm_up
from etude.demo.realtime.load import StreamingLoad
from etude.demo.realtime.serving import RouteKeys, RouteProcesses
from etude.demo.realtime.training import TrainingRun
from etude.demo.realtime.warm_up import WarmPolicy
from etude.feedback.simulate.event_sender import EventSender
from etude.feedback.simulate.population import Population
from etude.feedback.simulate.user_tasks import read_tasks
from etude.feedback.simulate.users import draw_users, forgive_escapes

REFUSING = 0.05
"""Share of users who did not agree to the terms."""
_CLIENT = "client-0"
"""Streams without a pause; did not agree either, so that its turns are in no window."""
_WINDOW_SHARE = 0.7
"""Rollouts of a window, for each user. Some fail, leave or refuse; the rest of a round is left out:
windows close by their size alone, and are the same however fast a machine is."""
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSettings:
    """Sizes and places of a demo."""

    folder: Path
    """Of everything that is written."""
    seed: int = 0
    num_users: int = 400
    num_rounds: int = 3
    """Of visits whose windows train."""
    horizon_s: int = 5
    """Age at which an edit's persistence counts; a product has an hour or a day."""
    forgives: bool = False
    """All users dislike edits without tests, and forgive questions and broken calls."""
    training: Mapping[str, str] = field(default_factory=dict)
    """Settings of the run's phase that differ from the manifest's, by path."""
    windows: Mapping[str, str] = field(default_factory=dict)
    """Settings of the feedback service that differ from those of Act 1."""


@dataclass(slots=True)
class Stage:
    """Everything that an act uses."""

    settings: StageSettings
    run: TrainingRun
    description: Mapping[str, Any]
    """Name, uid and spec of the run."""
    processes: RouteProcesses
    keys: RouteKeys
    refusing: frozenset[str]
    """Users who did not agree to the terms."""
    population: Population
    sender: EventSender
    load: StreamingLoad
    releases: ReleaseClient
    served: VersionId
    """By the stable channel."""

    async def promote(self, version: VersionId, reason: str) -> None:
        """Let the stable channel serve a version that no gate has seen.

        Raises:
            UserError: the feedback service refuses it.
        """
        name = f"{self.description['uid']}@{version}"
        decision = await self.releases.promote(
            name, reason, f"promote-{version}", without_gate=True
        )
        require_action("Promote", decision)
        self.served = version

    async def roll_back(self, to: VersionId, reason: str) -> None:
        """Take the served version back; the one before it follows.

        Raises:
            UserError: the feedback service refuses it.
        """
        request = f"roll-back-{self.served}"
        decision = await self.releases.roll_back(str(self.served), reason, request)
        require_action("Rollback", decision)
        self.served = to

    async def restart_feedback(self, settings: Mapping[str, str]) -> None:
        """Restart the feedback service with some other settings.

        Raises:
            UserError: it did not become ready in time.
        """
        await self.processes.stop_process("feedback")
        await self.processes.start_feedback({**_window_settings(self.settings), **settings})

    async def await_served(self) -> None:
        """Wait until users are served by the version of the stable channel.

        Raises:
            UserError: they are not.
        """
        wanted = str(self.served)
        await self.run.await_value("served version", lambda: self.load.version == wanted or None)


class Clients(NamedTuple):
    """Clients of simulated users."""

    openai: openai.AsyncOpenAI
    http: httpx2.AsyncClient


@contextlib.asynccontextmanager
async def open_clients(processes: RouteProcesses) -> AsyncIterator[Clients]:
    """Open the clients of a route's users."""
    async with (
        httpx2.AsyncClient(timeout=_TIMEOUT_S) as http,
        openai.AsyncOpenAI(
            base_url=f"{processes.gateway_url}/v1", api_key="-", max_retries=0
        ) as client,
    ):
        yield Clients(client, http)


class Visitors(NamedTuple):
    """All who use a route."""

    keys: RouteKeys
    refusing: frozenset[str]
    """Users who did not agree to the terms."""
    population: Population
    load: StreamingLoad


def bring_visitors(
    settings: StageSettings, policy: WarmPolicy, processes: RouteProcesses, clients: Clients
) -> Visitors:
    """Draw the users of a seed, and write the keys of all."""
    users = draw_users(settings.num_users, seed=settings.seed)
    if settings.forgives:
        strict = draw_users(settings.num_users, seed=settings.seed, wants_tests=1.0)
        users = forgive_escapes(strict)
    names = [user.name for user in users]
    refusing = names[: round(REFUSING * len(names))]
    keys = serving.make_keys(processes.keys_file, names[len(refusing) :], [*refusing, _CLIENT])
    population = Population(
        users=users,
        tasks=read_tasks(policy.tasks),
        keys=keys.users,
        client=clients.openai,
        model=serving.MODEL,
        sender=EventSender(clients.http, processes.feedback_url, serving.TENANT, serving.TERMS),
        horizon_s=settings.horizon_s,
    )
    client = clients.openai.with_options(api_key=keys.users[_CLIENT])
    load = StreamingLoad(client, serving.MODEL, population.tasks[0].instruction)
    return Visitors(keys, frozenset(refusing), population, load)


@contextlib.asynccontextmanager
async def run_load(load: StreamingLoad) -> AsyncIterator[None]:
    """Let the streaming client ask until the block ends."""
    # Not in a group: an error of the block would be wrapped.
    task = asyncio.create_task(load.run(), name="load")
    try:
        yield
    finally:
        await load.stop()
        await task


@contextlib.asynccontextmanager
async def open_stage(settings: StageSettings, policy: WarmPolicy) -> AsyncIterator[Stage]:
    """Start the run, the route and the streaming client; stop them when the block ends.

    Raises:
        UserError: one does not start.
    """
    folder = settings.folder
    run = TrainingRun.start(
        warm_up.find_manifest("rlrun.yaml"),
        folder / "run",
        [
            f"spec.model.uri={policy.uri}",
            f"spec.model.seed={settings.seed}",
            f"spec.phases.0.feedback.uri={(folder / 'run').resolve().as_uri()}",
            *(f"spec.phases.0.{path}={value}" for path, value in settings.training.items()),
        ],
    )
    processes = RouteProcesses(folder, run.uri)
    try:
        async with open_clients(processes) as clients:
            stage = await _start_stage(settings, policy, run, processes, clients)
            async with run_load(stage.load):
                yield stage
    finally:
        await processes.stop()
        await run.stop()


async def _start_stage(
    settings: StageSettings,
    policy: WarmPolicy,
    run: TrainingRun,
    processes: RouteProcesses,
    clients: Clients,
) -> Stage:
    visitors = bring_visitors(settings, policy, processes, clients)
    description = await run.await_run()
    # All parts import at the same time: the learner's version comes last.
    engine = await processes.start_engine(STABLE, describe_engine(description), serves_later=True)
    await processes.start_feedback(_window_settings(settings))
    stage = Stage(
        settings=settings,
        run=run,
        description=description,
        processes=processes,
        keys=visitors.keys,
        refusing=visitors.refusing,
        population=visitors.population,
        sender=visitors.population.sender,
        load=visitors.load,
        releases=ReleaseClient(processes.release_address, visitors.keys.backend),
        served=await run.await_version(),
    )
    await stage.promote(stage.served, "the warmed-up policy")
    await processes.start_gateway(policy.uri, {STABLE: [engine]})
    await processes.await_engine(STABLE)
    return stage


def require_action(action: str, decision: DecisionText) -> None:
    """Refuse to go on after another decision.

    Raises:
        UserError: it is another one.
    """
    if decision.action != action:
        what = f"decided {decision.action}: {decision.sentence}"
        raise UserError(Problem("Conflict", what, "the feedback service", "see feedback.log"))


def describe_engine(description: Mapping[str, Any]) -> Mapping[str, object]:
    """The run as an engine of the route reads it: the run itself has none."""
    spec = description["spec"]
    engine = {"maxModelLen": 1024, "maxConcurrent": 64, "kvCacheMib": 256}
    return {**description, "spec": {**spec, "roles": {**spec["roles"], "inference": engine}}}


def size_window(settings: StageSettings) -> int:
    """Rollouts of a window of Act 1."""
    return round(_WINDOW_SHARE * settings.num_users)


def _window_settings(settings: StageSettings) -> Mapping[str, str]:
    most = size_window(settings)
    return {
        "ETUDE_FEEDBACK_WINDOW_ROLLOUTS": str(most),
        "ETUDE_FEEDBACK_WINDOW_MIN_ROLLOUTS": str(most),
        "ETUDE_FEEDBACK_WINDOW_AGE_S": "600",
        "ETUDE_FEEDBACK_HORIZON_S": str(settings.horizon_s),
        **settings.windows,
    }
