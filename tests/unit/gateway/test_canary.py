"""A gateway gives the canary to the users whom the newest record of its channel names."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.support.gateway.served import (
    MODEL,
    PlayedEngine,
    ServedGateway,
    serve_route,
    start_engine,
)
from tests.support.release.channel_records import ChannelWriter

from etude.agent.chat import ChatFormat
from etude.common.blobs import open_store
from etude.common.errors import StoreError
from etude.common.experiments.assignment import Arm, assign_arm
from etude.common.release.channels import CANARY, ChannelExperiment, channel_key
from etude.gateway import canary
from etude.gateway.canary import CanaryWatch

STABLE_VERSION, CANARY_VERSION = 3, 8
USER = "acme/alice"
SALT = next(
    str(salt) for salt in range(1000) if assign_arm("try", str(salt), USER, 100) is Arm.TREATMENT
)
"""Alice is among the first who have the canary."""


def compare(share: int) -> ChannelExperiment:
    return ChannelExperiment(name="try", salt=SALT, share=share)


@dataclass
class Split:
    """A gateway with one engine of each channel, and the records that it follows."""

    gateway: ServedGateway
    stable: PlayedEngine
    canary: PlayedEngine
    channel: ChannelWriter
    servers: list[Any]
    """Of both engines."""
    messages: list[Any] = field(default_factory=list)

    @property
    def watch(self) -> CanaryWatch:
        assert self.gateway.parts.canary is not None
        return self.gateway.parts.canary

    async def decide(self, number: int | None, share: int | None = None) -> None:
        experiment = None if share is None else compare(share)
        self.channel.serve(number, experiment=experiment)
        await self.watch.poll()

    async def talk(self) -> int:
        """Let Alice say one more thing; returns the number of the version that answered."""
        self.messages.append({"role": "user", "content": "Go on."})
        async with httpx2.AsyncClient() as client:
            answer = await client.post(
                f"{self.gateway.url}/v1/chat/completions",
                headers={"authorization": f"Bearer {self.gateway.key}"},
                json={"model": MODEL, "messages": self.messages},
            )
        assert answer.status_code == 200, answer.text
        self.messages.append(answer.json()["choices"][0]["message"])
        return int(answer.headers["x-policy-version"].split(".")[1])


@pytest.fixture
async def split(tmp_path: Path, plain: ChatFormat, outage_s: int) -> AsyncIterator[Split]:
    stable = PlayedEngine(plain, lambda _: "Stable.", number=STABLE_VERSION)
    tried = PlayedEngine(plain, lambda _: "Tried.", number=CANARY_VERSION)
    servers = [await start_engine(engine) for engine in (stable, tried)]
    targets = [f"127.0.0.1:{server.port}" for server in servers]
    uri = (tmp_path / "run").as_uri()
    route = {"canary": [targets[1]], "channels": {"uri": uri}}
    writer = ChannelWriter(open_store(uri), CANARY)
    async with serve_route(tmp_path, plain, [targets[0]], route, outage_s=outage_s) as gateway:
        yield Split(gateway, stable, tried, writer, servers)
    for server in servers:
        await server.stop(0)


async def test_without_a_record_everyone_has_the_stable_channel(split: Split) -> None:
    await split.watch.start()
    assert await split.talk() == STABLE_VERSION
    [record] = await split.gateway.records()
    assert (record.arm, record.experiment) == ("stable", "")


async def test_an_arm_lasts_while_the_share_grows_and_ends_with_the_canary(split: Split) -> None:
    for share in (100, 500, 5_000):
        await split.decide(CANARY_VERSION, share)
        assert await split.talk() == CANARY_VERSION
    await split.decide(None)
    assert await split.talk() == STABLE_VERSION
    arms = [(record.arm, record.experiment) for record in await split.gateway.records()]
    assert arms == [("treatment", "try")] * 3 + [("stable", "")]


async def test_a_session_goes_on_over_a_roll_back_with_the_tokens_that_were_sampled(
    split: Split,
) -> None:
    await split.decide(CANARY_VERSION, 5_000)
    await split.talk()
    await split.decide(None)
    await split.talk()
    before, after = await split.gateway.records()
    assert (before.rollout_id, before.branch) == (after.rollout_id, after.branch)
    prompt = [*split.stable.requests[-1].prompt_token_ids]
    first = [*split.canary.requests[-1].prompt_token_ids, *before.token_ids]
    assert prompt[: len(first)] == first


async def test_nobody_is_given_a_version_that_the_record_does_not_name(split: Split) -> None:
    split.canary.number = CANARY_VERSION - 1
    await split.decide(CANARY_VERSION, 5_000)
    assert await split.talk() == STABLE_VERSION
    split.canary.number = CANARY_VERSION
    await split.watch.poll()
    assert await split.talk() == CANARY_VERSION


async def test_a_newest_record_that_cannot_be_read_ends_the_canary(split: Split) -> None:
    await split.decide(CANARY_VERSION, 5_000)
    split.channel.store.put(channel_key(CANARY, 2), b"{}")
    await split.watch.poll()
    assert await split.talk() == STABLE_VERSION
    split.channel.number = 2
    await split.decide(CANARY_VERSION, 5_000)
    assert await split.talk() == CANARY_VERSION


async def test_arms_last_while_the_store_is_away(
    split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise StoreError("the store is away")

    await split.decide(CANARY_VERSION, 5_000)
    with monkeypatch.context() as patch:
        patch.setattr(canary, "newest_record", fail)
        await split.watch.poll()
    assert await split.talk() == CANARY_VERSION


async def test_users_of_the_canary_have_the_stable_version_while_its_engines_are_away(
    split: Split,
) -> None:
    await split.decide(CANARY_VERSION, 5_000)
    assert await split.talk() == CANARY_VERSION
    await split.servers[1].stop(0)
    assert await split.talk() == STABLE_VERSION
    await split.watch.poll()
    assert await split.talk() == STABLE_VERSION
    records = await split.gateway.records()
    # As they were assigned, with the versions that sampled.
    assert {(record.arm, record.experiment) for record in records} == {("treatment", "try")}
    versions = [record.spans[0].sampled.number for record in records]
    assert versions == [CANARY_VERSION, STABLE_VERSION, STABLE_VERSION]


@pytest.mark.parametrize("outage_s", [1])
async def test_a_canary_that_hangs_ends_no_turn(split: Split) -> None:
    await split.decide(CANARY_VERSION, 5_000)
    split.canary.pause_s = 60
    assert await split.talk() == STABLE_VERSION
