"""A real engine behind the gateway: streams of an unchanged client live through swaps."""

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from tests.support.gateway.served import MODEL, ServedGateway, serve_route
from tests.support.weights.model_tensors import schema_of, words_of
from tests.support.weights.publishing import TrainedPolicy
from transformers import AutoConfig, AutoModelForCausalLM

from etude.agent.chat import ChatFormat
from etude.common.rpc.channels import dial
from etude.v1 import weights_pb2, weights_pb2_grpc

SWAPS = 5
CLIENTS = 4
TURNS = 3
TURN_TOKENS = 24
DEADLINE_S = 120


async def converse(gateway: ServedGateway, name: str, done: asyncio.Event) -> int:
    """Talk until everything is swapped; returns the number of turns, none of which failed."""
    client = openai.AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key=gateway.key, max_retries=0, timeout=120
    )
    turns = 0
    while not done.is_set() or turns < TURNS:
        messages: list[Any] = [{"role": "user", "content": name}]
        for _ in range(TURNS):
            stream = await client.chat.completions.create(
                model=MODEL, messages=messages, stream=True, max_tokens=TURN_TOKENS
            )
            text, finish = "", None
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
                finish = chunk.choices[0].finish_reason or finish
            assert finish in {"stop", "length"}
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "x"}]
            turns += 1
    return turns


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
        talks = [
            asyncio.create_task(converse(gateway, f"Client {number}.", done))
            for number in range(CLIENTS)
        ]
        for _ in range(SWAPS):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.01)
            policy.words = words_of(model)
            request = weights_pb2.CommitVersionRequest(version=role.publish(policy).to_proto())
            await engine.CommitVersion(request, timeout=DEADLINE_S)
        done.set()
        turns = sum(await asyncio.gather(*talks))
        records = await gateway.records()
    await channel.close()
    assert len(records) == turns
    versions = {span.sampled.number for record in records for span in record.spans}
    assert len(versions) > 1
    for record in records:
        ends = [span.end for span in record.spans]
        assert (ends[-1], len(record.logprobs)) == (len(record.token_ids), len(record.token_ids))
