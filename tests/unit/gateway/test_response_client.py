"""An unchanged openai client talks to a policy through the Responses protocol."""

import json
from typing import Any

import openai
import pytest
from tests.support.gateway.served import MODEL, ServedGateway
from tests.support.native_template import write_call

from etude.agent.chat import ChatFormat

TOOLS: Any = [
    {
        "type": "function",
        "name": "read_file",
        "description": "Read a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        "strict": False,
    }
]
CALL = write_call("read_file", path="a.py")


def client_of(gateway: ServedGateway) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key=gateway.key, max_retries=0, timeout=30
    )


async def test_a_response_is_answered(gateway: ServedGateway) -> None:
    answer = await client_of(gateway).responses.create(
        model=MODEL, instructions="Be brief.", input="Fix it."
    )
    assert (answer.output_text, answer.status) == ("Turn 1.", "completed")
    assert answer.usage is not None
    assert answer.usage.total_tokens > answer.usage.output_tokens > 0


async def test_a_stream_ends_with_the_response_that_its_events_made(
    serve: Any, thinking: ChatFormat
) -> None:
    async with serve(thinking, lambda _: "<think>Hm.</think>It is done.") as gateway:
        async with client_of(gateway).responses.stream(model=MODEL, input="Fix it.") as stream:
            events: list[Any] = [event async for event in stream]
            final = await stream.get_final_response()
        deltas = [each.delta for each in events if each.type == "response.output_text.delta"]
        assert "".join(deltas) == final.output_text == "It is done."
        assert [item.type for item in final.output] == ["reasoning", "message"]
        numbers = [each.sequence_number for each in events if hasattr(each, "sequence_number")]
        assert numbers == sorted(numbers)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_function_is_called_and_its_output_is_read(
    serve: Any, native: ChatFormat, *, is_streamed: bool
) -> None:
    def say(prompt: str) -> str:
        return "Done." if "<tool_response>" in prompt else f"I look.{CALL}"

    async with serve(native, say) as gateway:
        client = client_of(gateway)

        async def ask(items: Any) -> Any:
            if not is_streamed:
                return await client.responses.create(model=MODEL, input=items, tools=TOOLS)
            async with client.responses.stream(model=MODEL, input=items, tools=TOOLS) as stream:
                return await stream.get_final_response()

        items: list[Any] = [{"role": "user", "content": "Fix it."}]
        first = await ask(items)
        call = first.output[1]
        assert (call.name, json.loads(call.arguments)) == ("read_file", {"path": "a.py"})
        items += [each.to_dict() for each in first.output]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "x = 1"})
        second = await ask(items)
        assert second.output_text == "Done."
        one, two = gateway.engines[0].requests
        sampled = [*one.prompt_token_ids, *native.completion(f"I look.{CALL}")]
        assert [*two.prompt_token_ids][: len(sampled)] == sampled


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("parallel_tool_calls", {"parallel_tool_calls": False}),
        ("reasoning.effort", {"reasoning": {"effort": "low"}}),
    ],
)
async def test_what_engines_do_not_carry_out_is_refused_by_name(
    gateway: ServedGateway, field: str, values: Any
) -> None:
    with pytest.raises(openai.BadRequestError, match=field):
        await client_of(gateway).responses.create(model=MODEL, input="Fix it.", **values)


async def test_a_conversation_that_nobody_stores_is_refused_by_name(
    gateway: ServedGateway,
) -> None:
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        await client_of(gateway).responses.create(
            model=MODEL, input="Go on.", previous_response_id="resp_1"
        )
