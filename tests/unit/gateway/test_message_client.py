"""An unchanged anthropic client talks to a policy through the gateway."""

from typing import Any

import anthropic
import pytest
from tests.support.gateway.served import MODEL, ServedGateway
from tests.support.native_template import write_call

from etude.agent.chat import ChatFormat

ASK: Any = [{"role": "user", "content": "Fix it."}]
TOOLS: Any = [
    {
        "name": "read_file",
        "description": "Read a file.",
        "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
    }
]
CALL = write_call("read_file", path="a.py")


def client_of(gateway: ServedGateway) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(
        base_url=gateway.url, api_key=gateway.key, max_retries=0, timeout=30
    )


async def test_a_message_is_answered(gateway: ServedGateway, plain: ChatFormat) -> None:
    answer = await client_of(gateway).messages.create(
        model=MODEL, max_tokens=50, system="Be brief.", messages=ASK
    )
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": "Turn 1."}]
    (request,) = gateway.engines[0].requests
    assert answer.stop_reason == "end_turn"
    assert answer.usage.input_tokens == len(request.prompt_token_ids)
    assert plain.decode(request.prompt_token_ids).startswith("<|system|>Be brief.<|end|>")


async def test_thinking_and_text_stream_in_blocks_of_their_own(
    serve: Any, thinking: ChatFormat
) -> None:
    async with serve(thinking, lambda _: "<think>Hm, well.</think>\n\nIt is done.") as gateway:
        async with client_of(gateway).messages.stream(
            model=MODEL, max_tokens=50, messages=ASK
        ) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            final: Any = await stream.get_final_message()
        assert text == "It is done."
        assert [block.type for block in final.content] == ["thinking", "text"]
        assert final.content[0].thinking == "Hm, well."
        assert final.usage.output_tokens > 0


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_tool_is_used_and_its_result_is_read(
    serve: Any, native: ChatFormat, *, is_streamed: bool
) -> None:
    def say(prompt: str) -> str:
        return "Done." if "<tool_response>" in prompt else f"I look.{CALL}"

    async with serve(native, say) as gateway:
        client = client_of(gateway)

        async def ask(messages: Any) -> Any:
            given: Any = {"model": MODEL, "max_tokens": 90, "messages": messages, "tools": TOOLS}
            if not is_streamed:
                return await client.messages.create(**given)
            async with client.messages.stream(**given) as stream:
                return await stream.get_final_message()

        first = await ask(ASK)
        assert (first.stop_reason, first.content[0].text) == ("tool_use", "I look.")
        use = first.content[1]
        assert (use.name, use.input) == ("read_file", {"path": "a.py"})
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "x = 1"}
        second = await ask(
            [
                *ASK,
                {"role": "assistant", "content": [each.to_dict() for each in first.content]},
                {"role": "user", "content": [result, {"type": "text", "text": "Go on."}]},
            ]
        )
        assert second.content[0].text == "Done."
        one, two = gateway.engines[0].requests
        sampled = [*one.prompt_token_ids, *native.completion(f"I look.{CALL}")]
        assert [*two.prompt_token_ids][: len(sampled)] == sampled
        assert native.decode([*two.prompt_token_ids][len(sampled) :]) == (
            "<|tool|>read_file: <tool_response>x = 1</tool_response><|end|>"
            "<|user|>Go on.<|end|><|assistant|>"
        )


async def test_tokens_of_a_prompt_are_counted_without_an_engine(gateway: ServedGateway) -> None:
    client = client_of(gateway)
    counted = await client.messages.count_tokens(model=MODEL, messages=ASK)
    assert gateway.engines[0].requests == []
    answer = await client.messages.create(model=MODEL, max_tokens=50, messages=ASK)
    assert counted.input_tokens == answer.usage.input_tokens


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("thinking", {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
        ("top_k", {"extra_body": {"top_k": 5}}),
        ("output_format", {"extra_body": {"output_format": {"type": "json_schema"}}}),
        ("output_config", {"extra_body": {"output_config": {"effort": "low"}}}),
        (
            "tool_choice.disable_parallel_tool_use",
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        ),
    ],
)
async def test_what_engines_do_not_carry_out_is_refused_by_name(
    gateway: ServedGateway, field: str, values: Any
) -> None:
    with pytest.raises(anthropic.BadRequestError, match=field):
        await client_of(gateway).messages.create(
            model=MODEL, max_tokens=2048, messages=ASK, **values
        )
    assert gateway.engines[0].requests == []


async def test_an_image_is_refused_by_its_place(gateway: ServedGateway) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "aaaa"}
    messages: Any = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\]"):
        await client_of(gateway).messages.create(model=MODEL, max_tokens=5, messages=messages)


async def test_a_wrong_key_is_refused_in_the_protocols_own_words(gateway: ServedGateway) -> None:
    client = client_of(gateway).with_options(api_key="etude_wrong")
    with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
        await client.messages.create(model=MODEL, max_tokens=5, messages=ASK)
