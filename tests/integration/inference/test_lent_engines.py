"""Two real engines of users, of which one samples rollouts whenever users do without it."""

import asyncio
import itertools
import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from tests.support import figures
from tests.support.gateway.served import MODEL, ServedGateway, serve_route
from tests.support.release.channel_records import ChannelWriter
from tests.support.weights.model_tensors import schema_of, words_of
from tests.support.weights.publishing import TrainedPolicy
from transformers import AutoConfig, AutoModelForCausalLM

from etude.agent.chat import ChatFormat
from etude.common import weights
from etude.common.blobs import Store, open_store
from etude.common.release.channels import STABLE
from etude.common.rpc.channels import dial
from etude.common.weights import VersionId
from etude.trainer.controller.publishing.lent_engines import LentEngines
from etude.trainer.rollouts.engine_client import EngineSampler
from etude.trainer.rollouts.outage import OutageBudget
from etude.trainer.routing.router import Router
from etude.trainer.routing.table import RoutingTable
from etude.v1 import inference_pb2_grpc

RUN_UID = "uid-tiny"
NEWEST = VersionId(1, 6)
"""Of the run; users are served version 0."""
WINDOW_S = 2
"""Far shorter than between two bursts, so that each of these is one that nobody expected."""
LENDING = {"minReplicas": 1, "turnsPerEngine": 2, "windowSeconds": WINDOW_S}
BURSTS, BURST_S, BURST_USERS = 4, 7.0, 5
LONE_S = 0.7
TURN_TOKENS, ROLLOUT_TOKENS = 24, 200
LIMIT_S = 120


@dataclass
class Fleet:
    """Engines of the stable channel, at version 0 of a run that is at its version 6."""

    folder: Path
    """Of the model."""
    roles: list[Any]

    @property
    def targets(self) -> list[str]:
        return [f"127.0.0.1:{role.grpc_port}" for role in self.roles]

    def returns(self) -> tuple[int, float]:
        """Number of times that an engine came back, and the seconds of all together."""
        found = [0.0, 0.0]
        for role in self.roles:
            text = role.await_answer(role.probe_port, "/metrics", 200).text
            for place, name in enumerate(("count", "sum")):
                (value,) = re.findall(rf"(?m)^etude_lending_return_seconds_{name} (\S+)$", text)
                found[place] += float(value)
        return int(found[0]), found[1]


def publish_versions(store: Store, folder: Path) -> None:
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    policy = TrainedPolicy(schema_of(model), words_of(model))
    policy.publish(store, 0, complete=True, run=RUN_UID)
    for number in range(1, NEWEST.number + 1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)
        policy.words = words_of(model)
        policy.publish(store, number, run=RUN_UID)


@pytest.fixture
async def fleet(tmp_path: Path, make_model: Any, make_role: Any) -> Fleet:
    folder, shared = make_model(tmp_path / "model"), tmp_path / "store"
    store = open_store(shared.as_uri())
    weights.claim_epoch(store, holder="test", parent=None, reason="start")
    await asyncio.to_thread(publish_versions, store, folder)
    ChannelWriter(store, STABLE, run_uid=RUN_UID).serve(0)
    variables = {"ETUDE_LENDING_RUN": "tiny", "ETUDE_LENDING_WINDOW_S": str(WINDOW_S)}
    roles = [
        make_role(
            tmp_path / f"engine-{number}",
            folder,
            shared=shared,
            pod=f"tiny-stable-{number}",
            channel=STABLE,
            lending=variables,
        )
        for number in range(2)
    ]
    for role in roles:
        await asyncio.to_thread(role.await_answer, role.probe_port, "/readyz", 200)
    return Fleet(folder, roles)


@dataclass
class Users:
    """People who ask one thing each: alone, and in bursts."""

    gateway: ServedGateway
    latency_s: list[float] = field(default_factory=list)
    versions: set[str] = field(default_factory=set)
    """Policy versions that answered."""
    failed: list[str] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    async def come(self) -> None:
        """A lone user now and then, and bursts."""
        async with asyncio.TaskGroup() as tasks:
            for burst in range(BURSTS):
                for number in range(int(BURST_S / LONE_S)):
                    tasks.create_task(self._ask(burst * BURST_S + number * LONE_S))
                for _ in range(BURST_USERS):
                    tasks.create_task(self._ask((burst + 1) * BURST_S - 1.0))

    async def _ask(self, at_s: float) -> None:
        await asyncio.sleep(at_s)
        message = {"role": "user", "content": f"Number {next(self._numbers)}."}
        body = {"model": MODEL, "messages": [message], "max_tokens": TURN_TOKENS}
        asked_s = time.monotonic()
        async with httpx2.AsyncClient(timeout=LIMIT_S) as client:
            answer = await client.post(
                f"{self.gateway.url}/v1/chat/completions",
                headers={"authorization": f"Bearer {self.gateway.key}"},
                json=body,
            )
        self.latency_s.append(time.monotonic() - asked_s)
        self.versions.add(answer.headers.get("x-policy-version", ""))
        if answer.status_code != 200:
            self.failed.append(answer.text)


@dataclass
class Rollouts:
    """A run without engines of its own, which samples on lent ones as its trainer does."""

    targets: Sequence[str]
    lent: LentEngines = field(default_factory=LentEngines)
    router: Router = field(default_factory=Router)
    lengths: list[int] = field(default_factory=list)
    interrupted: int = 0
    versions: set[int] = field(default_factory=set)
    lent_s: float = 0.0

    async def follow(self) -> None:
        """Keep the routing table as the controller does, and count the loans."""
        last_s = time.monotonic()
        for revision in itertools.count(1):
            await self.lent.look(self.targets)
            engines = tuple(self.lent.entries(NEWEST))
            self.router.use_table(RoutingTable(revision=revision, engines=engines))
            now_s = time.monotonic()
            self.lent_s += self.lent.num_live(NEWEST) * (now_s - last_s)
            last_s = now_s
            await asyncio.sleep(0.2)

    async def sample(self) -> None:
        """One completion after the other."""
        connections = {target: dial(target) for target in self.targets}
        try:
            for number in itertools.count():
                sampler = EngineSampler(
                    lambda target: inference_pb2_grpc.InferenceServiceStub(connections[target]),
                    self.router,
                    f"group-{number}",
                    f"rollout-{number}",
                    frozenset(),
                    OutageBudget(LIMIT_S),
                    LIMIT_S,
                )
                found = await sampler.generate(
                    [1, 2, 3], max_tokens=ROLLOUT_TOKENS, temperature=1.0, seed=number
                )
                self.lengths.append(len(found.token_ids))
                self.versions |= {span.sampled.number for span in found.spans}
                self.interrupted += sampler.counts.interrupted > 0
        finally:
            for connection in connections.values():
                await connection.close()


async def serve_bursts(
    fleet: Fleet, folder: Path, route: dict[str, object], rollouts: Rollouts
) -> Users:
    """Serve bursts of users, and let rollouts have what is lent."""
    chat = ChatFormat.load(fleet.folder)
    async with serve_route(folder, chat, fleet.targets, route, outage_s=LIMIT_S) as gateway:
        users = Users(gateway)
        lender = gateway.parts.lender
        tasks = [asyncio.create_task(rollouts.follow()), asyncio.create_task(rollouts.sample())]
        if lender is not None:
            tasks.append(asyncio.create_task(lender.run()))
        await users.come()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if lender is not None:
            lender.rules = lender.rules.model_copy(update={"min_replicas": len(fleet.targets)})
            await lender.step()
    await rollouts.lent.close()
    return users


def p99(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[math.ceil(0.99 * len(ordered)) - 1]


@pytest.mark.long
async def test_users_and_rollouts_share_engines_and_nothing_is_lost(
    tmp_path: Path, fleet: Fleet
) -> None:
    idle, borrowed = Rollouts(fleet.targets), Rollouts(fleet.targets)
    for name in ("alone", "shared"):
        (tmp_path / name).mkdir()
    alone = await serve_bursts(fleet, tmp_path / "alone", {}, idle)
    assert (idle.lent_s, idle.lengths) == (0.0, [])

    shared = await serve_bursts(fleet, tmp_path / "shared", {"lending": LENDING}, borrowed)

    count, seconds = await asyncio.to_thread(fleet.returns)
    figures.record(
        "lending",
        engine_p99_ratio=round(p99(shared.latency_s) / p99(alone.latency_s), 2),
        engine_p99_alone_ms=round(1000 * p99(alone.latency_s)),
        engine_p99_lent_ms=round(1000 * p99(shared.latency_s)),
        engine_returns=count,
        engine_return_mean_ms=round(1000 * seconds / max(1, count)),
        lent_engine_s=round(borrowed.lent_s, 1),
        lent_tokens=sum(borrowed.lengths),
        interrupted_rollouts=borrowed.interrupted,
        lost_turns=len(alone.failed) + len(shared.failed),
    )
    assert shared.failed == []
    assert {version.split(".")[-1] for version in shared.versions} == {"0"}
    assert borrowed.versions == {NEWEST.number}
    assert set(borrowed.lengths) == {ROLLOUT_TOKENS}, "an interrupted completion is whole"
    assert count >= BURSTS - 1
