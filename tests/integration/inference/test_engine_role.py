"""The real engine as a process: exact before, during and after each swap.

The oracle is transformers on the same tensors. Tests run in order on one engine: a start costs
twenty seconds.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.support.weights.model_tensors import schema_of, words_of
from tests.support.weights.publishing import TrainedPolicy
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from etude.common.rpc.channels import dial
from etude.common.weights import VersionId
from etude.common.weights.tensors.schema import Schema
from etude.v1 import inference_pb2, inference_pb2_grpc, weights_pb2, weights_pb2_grpc

pytestmark = pytest.mark.asyncio(loop_scope="module")

DEADLINE_S = 120
TOLERANCE = 1e-4
"""Two float32 implementations of the same sums; measured 1e-6, one stale weight gives 1e-1."""

PROMPT = [20, 21, 22, 23, 24]
LONG_PROMPT = [20 + i % 200 for i in range(100)]
"""More than three blocks of the prefix cache."""


class Policy:
    """The policy as a trainer holds it."""

    def __init__(self, folder: str) -> None:
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        self.published = TrainedPolicy(schema_of(self.model), words_of(self.model))

    def step(self, seed: int) -> None:
        """Change every weight, as an optimiser would, only more."""
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.03)
        self.published.words = words_of(self.model)

    @torch.no_grad()
    def logprobs(
        self,
        prompt: Sequence[int],
        tokens: Sequence[int],
        *,
        temperature: float = 1.0,
        past: Any = None,
    ) -> list[float]:
        """Log-probabilities of tokens after prompt, given the KV entries of what came before."""
        ids = torch.tensor([[*prompt, *tokens]])
        logits = self.model(ids, past_key_values=past).logits[0].float() / temperature
        table = logits.log_softmax(-1)
        return [float(table[len(prompt) - 1 + i, t]) for i, t in enumerate(tokens)]

    @torch.no_grad()
    def cache(self, tokens: Sequence[int]) -> Any:
        past = DynamicCache()
        self.model(torch.tensor([list(tokens)]), past_key_values=past)
        return past

    @torch.no_grad()
    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        tokens: list[int] = []
        for _ in range(count):
            logits = self.model(torch.tensor([[*prompt, *tokens]])).logits[0, -1]
            tokens.append(int(logits.argmax()))
        return tokens


@dataclass
class Completion:
    tokens: list[int]
    logprobs: list[float]
    spans: list[weights_pb2.PolicySpan]
    finish: int


@dataclass
class Client:
    """The role's two services."""

    inference: Any
    weights: Any
    health: Any

    def call(self, request_id: str, prompt: Sequence[int] = PROMPT, **sampling: Any) -> Any:
        stream = sampling.pop("stream", False)
        request = inference_pb2.GenerateRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling=inference_pb2.Sampling(**{"max_tokens": 24, "temperature": 1.0, **sampling}),
            stream=stream,
        )
        return self.inference.Generate(request, timeout=DEADLINE_S)

    async def sample(
        self, request_id: str, prompt: Sequence[int] = PROMPT, **sampling: Any
    ) -> Completion:
        return await gathered(self.call(request_id, prompt, **sampling))

    async def commit(self, version: VersionId) -> weights_pb2.WeightStatus:
        request = weights_pb2.CommitVersionRequest(version=version.to_proto())
        answer = await self.weights.CommitVersion(request, timeout=DEADLINE_S)
        status: weights_pb2.WeightStatus = answer.status
        return status

    async def status(self) -> weights_pb2.WeightStatus:
        request = weights_pb2.GetWeightStatusRequest()
        answer = await self.weights.GetWeightStatus(request, timeout=DEADLINE_S)
        status: weights_pb2.WeightStatus = answer.status
        return status


async def gathered(call: Any) -> Completion:
    found = Completion([], [], [], 0)
    async for message in call:
        found.tokens += message.token_ids
        found.logprobs += message.logprobs
        found.spans += message.spans
        found.finish = message.finish_reason
    return found


def worst(found: Sequence[float], expected: Sequence[float]) -> float:
    assert len(found) == len(expected) > 0
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))


@pytest.fixture(scope="module")
def policy(role: Any) -> Policy:
    return Policy(str(role.model))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(role: Any) -> AsyncIterator[Client]:
    role.await_answer(role.probe_port, "/livez", 200)
    role.await_answer(role.http_port, "/v1/models", 503)
    async with dial(f"127.0.0.1:{role.grpc_port}") as channel:
        await asyncio.wait_for(channel.channel_ready(), DEADLINE_S)
        yield Client(
            inference_pb2_grpc.InferenceServiceStub(channel),
            weights_pb2_grpc.WeightServiceStub(channel),
            health_pb2_grpc.HealthStub(channel),
        )


async def test_the_role_is_alive_but_not_ready_before_the_first_version(
    role: Any, client: Client
) -> None:
    assert role.await_answer(role.probe_port, "/readyz", 503).text == "not ready\n"
    assert (await client.status()).state == weights_pb2.REPLICA_STATE_LOADING
    check = await client.health.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
    assert check.status == health_pb2.HealthCheckResponse.NOT_SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.sample("early")
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    role.await_answer(role.http_port, "/v1/models", 503)


async def test_an_incomplete_first_version_is_refused(
    role: Any, client: Client, policy: Policy
) -> None:
    tensors = policy.published.schema.tensors
    incomplete = TrainedPolicy(Schema(grid=8, tensors=tensors[:-3]), policy.published.words)
    with pytest.raises(grpc.aio.AioRpcError, match="unfilled") as caught:
        await client.commit(role.publish(incomplete))
    assert caught.value.code() == grpc.StatusCode.DATA_LOSS
    assert (await client.status()).state == weights_pb2.REPLICA_STATE_NOT_READY


async def test_the_first_verified_version_makes_it_ready(
    role: Any, client: Client, policy: Policy
) -> None:
    status = await client.commit(role.publish(policy.published))
    assert status.state == weights_pb2.REPLICA_STATE_SERVING
    role.await_answer(role.probe_port, "/readyz", 200)
    check = await client.health.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
    assert check.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
async def test_logprobs_are_those_of_the_sampling_distribution(
    client: Client, policy: Policy, temperature: float
) -> None:
    found = await client.sample(f"t-{temperature}", temperature=temperature)
    # Greedy sampling has no distribution of its own: its log-probs are those at temperature 1.
    expected = policy.logprobs(PROMPT, found.tokens, temperature=temperature or 1.0)
    assert worst(found.logprobs, expected) < TOLERANCE
    if temperature == 0.0:
        assert found.tokens == policy.greedy(PROMPT, 24)


async def test_every_weight_is_new_after_each_swap(
    role: Any, client: Client, policy: Policy
) -> None:
    for seed in range(1, 4):
        policy.step(seed)
        version = role.publish(policy.published)
        status = await client.commit(version)
        assert VersionId.from_proto(status.live) == version
        # The long prompt is in the prefix cache under every older version.
        for prompt in (PROMPT, LONG_PROMPT):
            found = await client.sample(f"swap-{version}-{len(prompt)}", prompt)
            assert worst(found.logprobs, policy.logprobs(prompt, found.tokens)) < TOLERANCE
            [span] = found.spans
            assert VersionId.from_proto(span.sampled) == version
            assert VersionId.from_proto(span.context) == version


async def test_a_swap_in_the_middle_of_a_request_is_exact_to_the_token(
    role: Any, client: Client, policy: Policy
) -> None:
    call = client.call("middle", max_tokens=240, stream=True)
    first = await anext(aiter(call))
    before = await client.status()
    older = Policy(str(role.model))
    older.model.load_state_dict(policy.model.state_dict())
    policy.step(10)
    after = await client.commit(role.publish(policy.published))
    found = await gathered(call)
    tokens = [*first.token_ids, *found.tokens]
    logprobs = [*first.logprobs, *found.logprobs]
    one, two = found.spans
    assert (one.sampled, two.sampled) == (before.live, after.live)
    assert (one.context, two.context) == (before.live, before.live)
    assert (one.start, two.end, len(tokens)) == (0, 240, 240)
    swap = one.end
    assert swap == two.start
    assert worst(logprobs[:swap], older.logprobs(PROMPT, tokens[:swap])) < TOLERANCE
    # The new weights go on from the old weights' KV entries; the last token has none yet.
    past = older.cache([*PROMPT, *tokens[: swap - 1]])
    rest = policy.logprobs([tokens[swap - 1]], tokens[swap:], past=past)
    assert worst(logprobs[swap:], rest) < TOLERANCE


async def test_openai_clients_get_the_same_policy_and_its_version(
    role: Any, client: Client, policy: Policy
) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 8, "logprobs": 0}
    url = f"http://127.0.0.1:{role.http_port}/v1/completions"
    async with httpx.AsyncClient(timeout=DEADLINE_S) as http:
        answer = await http.post(url, json=body | {"return_token_ids": True, "ignore_eos": True})
    [choice] = answer.json()["choices"]
    assert choice["token_ids"] == policy.greedy(PROMPT, 8)
    expected = policy.logprobs(PROMPT, choice["token_ids"])
    assert worst(choice["logprobs"]["token_logprobs"], expected) < TOLERANCE
    live = VersionId.from_proto((await client.status()).live)
    assert answer.headers["x-policy-version"] == str(live)


async def test_many_requests_at_once_are_each_exact(client: Client, policy: Policy) -> None:
    prompts = [[20 + i, *LONG_PROMPT[: 3 * i]] for i in range(32)]
    found = await asyncio.gather(
        *(client.sample(f"many-{i}", prompt) for i, prompt in enumerate(prompts))
    )
    for prompt, completion in zip(prompts, found, strict=True):
        assert len(completion.tokens) == 24
        expected = policy.logprobs(prompt, completion.tokens)
        assert worst(completion.logprobs, expected) < TOLERANCE


async def test_a_stop_token_ends_the_completion_and_is_part_of_it(
    client: Client, policy: Policy
) -> None:
    greedy = policy.greedy(PROMPT, 6)
    stop = greedy[-1]
    found = await client.sample("stop", temperature=0.0, stop_token_ids=[stop])
    assert found.tokens == greedy[: greedy.index(stop) + 1]
    assert len(found.logprobs) == len(found.tokens)
    assert found.finish == inference_pb2.FINISH_REASON_STOP


async def test_the_same_seed_gives_the_same_tokens(client: Client) -> None:
    first = await client.sample("seed-a", seed=7)
    again = await client.sample("seed-b", seed=7)
    other = await client.sample("seed-c", seed=8)
    assert first.tokens == again.tokens != other.tokens


async def test_cancelling_frees_the_slot(role: Any, client: Client) -> None:
    calls = [client.call(f"cancel-{i}", max_tokens=250, stream=i % 2 == 0) for i in range(8)]
    await anext(aiter(calls[0]))
    for call in calls:
        call.cancel()
    async with asyncio.timeout(DEADLINE_S):
        while running_requests(role) > 0:  # noqa: ASYNC110 - the engine is another process
            await asyncio.sleep(0.1)
    assert len((await client.sample("cancel-0")).tokens) == 24


def running_requests(role: Any) -> float:
    lines = role.await_answer(role.probe_port, "/metrics", 200).text.splitlines()
    names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
    return sum(float(line.split()[-1]) for line in lines if line.startswith(names))


def flipped(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


SPOILT = {
    "a wrong bit": (flipped, "blake3", grpc.StatusCode.DATA_LOSS, "Corrupt"),
    "cut short": (lambda data: data[:-80], "weights/deltas/", grpc.StatusCode.DATA_LOSS, "Corrupt"),
    "gone": (lambda _: None, "not in the store", grpc.StatusCode.NOT_FOUND, "NotFound"),
}


@pytest.mark.parametrize("how", SPOILT)
async def test_a_spoilt_version_leaves_every_old_weight_in_place(
    role: Any, client: Client, policy: Policy, how: str
) -> None:
    spoil, words, code, reason = SPOILT[how]
    before = await client.sample(f"{how}-before", temperature=0.0)
    live = (await client.status()).live
    policy.step(20)
    version = role.publish_spoilt(policy.published, spoil)
    with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
        await client.commit(version)
    assert caught.value.code() == code
    status = await client.status()
    assert (status.live, status.reason) == (live, reason)
    after = await client.sample(f"{how}-after", temperature=0.0)
    assert (after.tokens, after.logprobs) == (before.tokens, before.logprobs)


async def test_a_version_that_would_lead_elsewhere_is_refused_before_the_first_write(
    role: Any, client: Client, policy: Policy
) -> None:
    before = await client.sample("elsewhere-before", temperature=0.0)
    policy.step(21)
    lies = role.publish_spoilt(policy.published, lambda data: data, state="0" * 32)
    with pytest.raises(grpc.aio.AioRpcError, match="would lead to state") as caught:
        await client.commit(lies)
    assert caught.value.code() == grpc.StatusCode.DATA_LOSS
    after = await client.sample("elsewhere-after", temperature=0.0)
    assert (after.tokens, after.logprobs) == (before.tokens, before.logprobs)


async def test_the_engines_own_metrics_are_beside_ours(role: Any) -> None:
    text = role.await_answer(role.probe_port, "/metrics", 200).text
    for name in (
        "etude_weights_pause_seconds_count",
        "etude_weights_stage_seconds_count",
        'etude_weights_bytes_total{codec="blocks",kind="complete"}',
        'etude_weights_bytes_total{codec="blocks",kind="delta"}',
        "etude_weights_corrupt_total",
        'etude_weights_lag_versions{replica="tiny-inference-0"}',
        "vllm:prefix_cache_hits",
        "vllm:time_to_first_token_seconds",
    ):
        assert name in text


@pytest.mark.long
async def test_a_fresh_engine_on_the_same_version_samples_the_same(
    role: Any, client: Client, policy: Policy
) -> None:
    await client.commit(role.publish(policy.published))
    swapped = await client.sample("swapped", temperature=0.0, max_tokens=60)
    assert role.stop() == 0
    role.start()
    role.await_answer(role.probe_port, "/readyz", 200)
    async with dial(f"127.0.0.1:{role.grpc_port}") as channel:
        fresh = Client(inference_pb2_grpc.InferenceServiceStub(channel), None, None)
        found = await fresh.sample("fresh", temperature=0.0, max_tokens=60)
    assert found.tokens == swapped.tokens
    assert worst(found.logprobs, swapped.logprobs) < TOLERANCE
