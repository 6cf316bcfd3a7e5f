"""The stage of a release: candidates, a route with two channels, and users; nothing trains."""

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import openai

from etude.cli.releases.client import DecisionText, Evaluated, ReleaseClient
from etude.common.blobs import Store, open_store
from etude.common.errors import Problem, UserError
from etude.common.release.channels import CANARY, STABLE
from etude.demo.realtime import serving
from etude.demo.realtime.candidates import MARGIN, Candidates
from etude.demo.realtime.serving import RouteProcesses
from etude.demo.realtime.stage import (
    StageSettings,
    Visitors,
    bring_visitors,
    describe_engine,
    open_clients,
    require_action,
    run_load,
)
from etude.demo.realtime.warm_up import WarmPolicy
from etude.feedback.release.records import ReleaseRecord, newest_release
from etude.feedback.simulate.conversations import VERSION

RULES = {
    "policy": "Automatic",
    "intervalSeconds": 1,
    "gate": {"margins": [{"metric": "success", "margin": MARGIN}], "minTasks": 100},
    "canary": {
        "steps": [2_500, 5_000],
        "stepSeconds": 1,
        "usersPerArm": 200,
        "minUsers": 40,
        "guardrails": [
            {
                "name": "complaints",
                "signal": "dissatisfied_followup",
                "relevant": 0.05,
                "isHigherBetter": False,
            }
        ],
        "signals": [],
    },
}
"""Rules for a route of hundreds of users: two steps, and harm that is large."""
_LOOK_S = 0.1
_PATIENCE_S = 120.0


@dataclass(slots=True)
class ReleaseStage:
    """Everything that the act uses."""

    settings: StageSettings
    candidates: Candidates
    processes: RouteProcesses
    store: Store
    visitors: Visitors
    client: openai.AsyncOpenAI
    releases: ReleaseClient
    served: str
    """Version of the stable channel."""
    num_probes: int = 0
    num_failed_probes: int = 0

    async def propose(self, evaluated: Evaluated) -> DecisionText:
        """Propose an evaluated candidate.

        Raises:
            UserError: the feedback service did not answer.
        """
        return await self.releases.propose(evaluated, "", "")

    async def await_end_of_canary(self) -> ReleaseRecord:
        """Wait for the decision that ends the canary."""
        while True:
            record = await asyncio.to_thread(newest_release, self.store)
            if record is not None and record.state.canary is None:
                return record
            await asyncio.sleep(_LOOK_S)

    async def await_share(self, *, is_zero: bool) -> None:
        """Wait until the gateway sends users to the canary, or nobody any more.

        Raises:
            UserError: it does not come.
        """
        ends_s = time.monotonic() + _PATIENCE_S
        while (await asyncio.to_thread(self.processes.read_canary_share) == 0) != is_zero:
            if time.monotonic() > ends_s:
                what = "does not follow the canary channel"
                raise UserError(Problem("Unreachable", what, "the gateway", "see gateway.log"))
            await asyncio.sleep(_LOOK_S)

    async def ask_version(self, user: str) -> str:
        """Ask for one token as a user; the version that served it, empty if the request failed."""
        self.num_probes += 1
        client = self.client.with_options(api_key=self.visitors.keys.users[user])
        try:
            answer = await client.chat.completions.with_raw_response.create(
                model=serving.MODEL, messages=[{"role": "user", "content": "?"}], max_tokens=1
            )
        except openai.OpenAIError:
            self.num_failed_probes += 1
            return ""
        return str(answer.headers[VERSION])


@contextlib.asynccontextmanager
async def open_release_stage(
    settings: StageSettings, policy: WarmPolicy, candidates: Candidates
) -> AsyncIterator[ReleaseStage]:
    """Start the feedback service, which serves the first version to everyone.

    Raises:
        UserError: it does not start.
    """
    store = settings.folder / "route"
    await asyncio.to_thread(shutil.copytree, candidates.store, store / "weights")
    processes = RouteProcesses(settings.folder, store.as_uri())
    try:
        async with open_clients(processes) as clients:
            visitors = bring_visitors(settings, policy, processes, clients)
            horizon = {"ETUDE_FEEDBACK_HORIZON_S": str(settings.horizon_s)}
            await processes.start_feedback(horizon, RULES)
            stage = ReleaseStage(
                settings=settings,
                candidates=candidates,
                processes=processes,
                store=open_store(processes.store),
                visitors=visitors,
                client=clients.openai,
                releases=ReleaseClient(processes.release_address, visitors.keys.backend),
                served=candidates.served_version,
            )
            name = f"{candidates.describe_run()['uid']}@{stage.served}"
            decision = await stage.releases.promote(
                name, "the version in use", "first", without_gate=True
            )
            require_action("Promote", decision)
            yield stage
    finally:
        await processes.stop()


@contextlib.asynccontextmanager
async def serve_route(stage: ReleaseStage, policy: WarmPolicy) -> AsyncIterator[None]:
    """Start engines of both channels and the gateway; the streaming client asks until the end.

    Raises:
        UserError: one does not start.
    """
    run = stage.candidates.describe_run()
    run["spec"] = {**run["spec"], "storage": {"uri": stage.processes.store}}
    engine = describe_engine(run)
    canary = await stage.processes.start_engine(CANARY, engine, serves_later=True)
    stable = await stage.processes.start_engine(STABLE, engine)
    await stage.processes.start_gateway(policy.uri, {STABLE: [stable], CANARY: [canary]})
    async with run_load(stage.visitors.load):
        yield
