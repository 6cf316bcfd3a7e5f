"""A real engine behind the gateway: streams of unchanged clients live through swaps."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import figures
from tests.support.gateway.served import ServedGateway, serve_route
from tests.support.gateway.streaming_users import StreamingUsers
from tests.support.release.channel_records import ChannelWriter
from tests.support.weights.followed_engine import TOLERANCE
from tests.support.weights.model_tensors import schema_of, words_of
from tests.support.weights.publishing import TrainedPolicy
from transformers import AutoConfig, AutoModelForCausalLM

from etude.agent.chat import ChatFormat
from etude.common import weights
from etude.common.blobs import Store, open_store
from etude.common.experiments.assignment import MAX_SHARE, Arm, assign_arm
from etude.common.release.channels import CANARY, STABLE, ChannelExperiment
from etude.common.rpc.channels import dial
from etude.common.weights import VersionId
from etude.gateway import metrics
from etude.v1 import turns_pb2, weights_pb2, weights_pb2_grpc

SWAPS = 20
PROTOCOLS = ("chat", "messages")
TURN_TOKENS = 24
DEADLINE_S = 120
RELEASES = 3
LONG_TOKENS = 60
TALK_S = 1.0
"""Users talk for so long between two decisions."""
RUN_UID = "uid-tiny"
"""Of the roles' run."""
EXPERIMENT = ChannelExperiment(name="try", salt="s", share=MAX_SHARE)


def check_and_record(users: StreamingUsers, through: str, **sizes: int) -> None:
    """No request failed, and no client or gateway sent one again."""
    retried = users.retries
    counts = {f"failed_in_{through}": len(users.failures), f"retried_in_{through}": retried}
    figures.record("gateway", **counts, **{f"turns_in_{through}": users.turns}, **sizes)
    assert (users.failures, retried) == ([], 0)


@pytest.mark.long
async def test_no_stream_fails_while_weights_are_swapped(
    tmp_path: Path, make_model: Any, make_role: Any
) -> None:
    folder = make_model(tmp_path / "model")
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(folder), dtype=torch.float32
    )
    policy = TrainedPolicy(schema_of(model), words_of(model))
    role = make_role(tmp_path / "role", folder)
    role.publish(policy, complete=True)
    await asyncio.to_thread(role.await_answer, role.probe_port, "/readyz", 200)
    (tmp_path / "gateway").mkdir()
    target = f"127.0.0.1:{role.grpc_port}"
    done = asyncio.Event()
    channel = dial(target)
    engine = weights_pb2_grpc.WeightServiceStub(channel)
    async with serve_route(tmp_path / "gateway", ChatFormat.load(folder), [target], {}) as gateway:
        users = StreamingUsers(gateway, TURN_TOKENS)
        talks = [
            asyncio.create_task(users.converse(f"Client {number}.", done, protocol=protocol))
            for number, protocol in enumerate(2 * PROTOCOLS)
        ]
        for _ in range(SWAPS):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.01)
            policy.words = words_of(model)
            request = weights_pb2.CommitVersionRequest(version=role.publish(policy).to_proto())
            await engine.CommitVersion(request, timeout=DEADLINE_S)
        done.set()
        await asyncio.gather(*talks)
        records = await gateway.records()
    await channel.close()
    check_and_record(users, "swaps", swaps=SWAPS)
    assert len(records) == users.turns
    versions = {span.sampled.number for record in records for span in record.spans}
    assert len(versions) > 1
    for record in records:
        ends = [span.end for span in record.spans]
        assert (ends[-1], len(record.logprobs)) == (len(record.token_ids), len(record.token_ids))


@dataclass
class Release:
    """Two engines of one run, each of a channel, and who decides about the channels."""

    folder: Path
    """Of the model."""
    model: Any
    policy: TrainedPolicy
    store: Store
    targets: dict[str, str]
    """Address of the engine of each channel."""
    stubs: dict[str, Any]
    writers: dict[str, ChannelWriter]

    def publish(self, number: int) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)
        self.policy.words = words_of(self.model)
        self.policy.publish(self.store, number, run=RUN_UID)

    async def decide(self, channel: str, number: int | None, **how: Any) -> None:
        """Append a record, and wait until the engine serves it."""
        self.writers[channel].serve(number, **how)
        request = weights_pb2.GetWeightStatusRequest()
        async with asyncio.timeout(DEADLINE_S):
            while number is not None:
                answer = await self.stubs[channel].GetWeightStatus(request)
                if answer.status.live.number == number and answer.status.HasField("live"):
                    return
                await asyncio.sleep(0.05)

    @torch.no_grad()
    def logprobs(self, number: int, tokens: list[int]) -> list[float]:
        """Log-probabilities of the tokens after the first under one version."""
        words = self.policy.published[VersionId(1, number)]
        for name, parameter in self.model.named_parameters():
            parameter.copy_(torch.from_numpy(words[name].view(np.float32)).view(parameter.shape))
        table = self.model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
        return [float(table[place, token]) for place, token in enumerate(tokens[1:])]


def choose_users() -> dict[Arm, str]:
    """One user of each arm."""
    found: dict[Arm, str] = {}
    for user in (f"user{number}" for number in range(100)):
        arm = assign_arm(EXPERIMENT.name, EXPERIMENT.salt, f"acme/{user}", EXPERIMENT.share)
        assert arm is not None, "everyone is exposed"
        found.setdefault(arm, user)
    return found


def check_after_roll_back(release: Release, record: turns_pb2.TurnRecord) -> None:
    """The tokens after a roll-back are the old version's, whatever was sampled before them."""
    last = record.spans[-1]
    tokens = [*record.prompt_token_ids, *record.token_ids]
    expected = release.logprobs(last.sampled.number, tokens)[len(record.prompt_token_ids) - 1 :]
    for place in range(last.start, last.end):
        assert abs(expected[place] - record.logprobs[place]) < TOLERANCE


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not holds():  # noqa: ASYNC110 - a poll of the channel has no event
            await asyncio.sleep(0.05)


@pytest.fixture
async def release(tmp_path: Path, make_model: Any, make_role: Any) -> AsyncIterator[Release]:
    """Both engines, which serve the first version."""
    folder, shared = make_model(tmp_path / "model"), tmp_path / "store"
    store = open_store(shared.as_uri())
    weights.claim_epoch(store, holder="test", parent=None, reason="start")
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    policy = TrainedPolicy(schema_of(model), words_of(model))
    policy.publish(store, 0, complete=True, run=RUN_UID)
    roles = {
        name: make_role(tmp_path / name, folder, shared=shared, pod=f"tiny-{name}-0", channel=name)
        for name in (STABLE, CANARY)
    }
    writers = {name: ChannelWriter(store, name, run_uid=RUN_UID) for name in roles}
    for name, role in roles.items():
        writers[name].serve(0)
        await asyncio.to_thread(role.await_answer, role.probe_port, "/readyz", 200)
    targets = {name: f"127.0.0.1:{role.grpc_port}" for name, role in roles.items()}
    connections = {name: dial(target) for name, target in targets.items()}
    stubs = {name: weights_pb2_grpc.WeightServiceStub(each) for name, each in connections.items()}
    yield Release(folder, model, policy, store, targets, stubs, writers)
    for connection in connections.values():
        await connection.close()


async def release_thrice(release: Release, gateway: ServedGateway) -> None:
    """Try a version on half of the users, give it to all, take it back from all; three times."""
    watch = gateway.parts.canary
    assert watch is not None
    watching = asyncio.create_task(watch.run())
    for number in range(1, 3 * RELEASES + 1):
        release.publish(number)
        if number % 3:
            continue  # a version that is never released
        await release.decide(CANARY, number, experiment=EXPERIMENT)
        await until(lambda: watch.experiment is not None)
        await asyncio.sleep(TALK_S)
        await release.decide(STABLE, number)
        await asyncio.sleep(TALK_S)
        await release.decide(STABLE, 0)
        await release.decide(CANARY, None)
        await until(lambda: watch.experiment is None)
    watching.cancel()


@pytest.mark.long
async def test_no_stream_fails_through_canaries_promotions_and_roll_backs(
    tmp_path: Path, release: Release
) -> None:
    users, done = choose_users(), asyncio.Event()
    interrupted = metrics.INTERRUPTED_CALLS._value.get()
    (tmp_path / "gateway").mkdir()
    async with serve_route(
        tmp_path / "gateway",
        ChatFormat.load(release.folder),
        [release.targets[STABLE]],
        {"canary": [release.targets[CANARY]], "channels": {"uri": release.store.url}},
        users=[*users.values()],
        outage_s=DEADLINE_S,
    ) as gateway:
        traffic = StreamingUsers(gateway, LONG_TOKENS)
        talks = [
            asyncio.create_task(traffic.converse(user, done, protocol=protocol))
            for user in users.values()
            for protocol in PROTOCOLS
        ]
        await release_thrice(release, gateway)
        done.set()
        await asyncio.gather(*talks)
        records = await gateway.records()
    check_and_record(traffic, "releases", releases=RELEASES)
    assert len(records) == traffic.turns
    assert metrics.INTERRUPTED_CALLS._value.get() == interrupted
    spans = [[span.sampled.number for span in record.spans] for record in records]
    assert {number for each in spans for number in each} == {0, *range(3, 3 * RELEASES + 1, 3)}
    assert {Arm(each.arm): each.user for each in records if each.experiment} == users
    for record, numbers in zip(records, spans, strict=True):
        if numbers != sorted(numbers) and record.num_prefix_tokens == 0:
            check_after_roll_back(release, record)
