"""Tool formats read what chat templates and other projects write, as other projects' parsers do."""

import functools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tests.support import chat_families
from tests.support.chat_families import FAMILIES, family_folder, package_file, template_of
from tokenizers import Tokenizer

from etude.agent.tool_calls import ParsedCall
from etude.agent.tool_formats import registry
from etude.agent.tool_formats.base import ToolFormat
from etude.agent.tool_formats.xml import as_texts

FORMATS = {each.tool_format.name: each.tool_format for each in registry.DETECTIONS}
TYPELESS = {"xml", "glm"}
WITH_TOOLS = [name for name, family in FAMILIES.items() if family.has_tools]

names = st.sampled_from(["f", "g", "read_file"])
keys = st.sampled_from(["a", "b", "path"])
texts = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=20)
"""Without carriage returns, which templates' own line endings would turn into newlines."""
values = st.recursive(
    texts | st.integers(-(10**9), 10**9) | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
calls = st.builds(ParsedCall, name=names, arguments=st.dictionaries(keys, values, max_size=3))
simple_texts = st.text("abc é.\n\"\\'{}", max_size=12).filter(lambda text: text == text.strip())
simple_values = simple_texts | st.integers(-99, 99) | st.lists(st.integers(0, 9), max_size=2)
simple_calls = st.builds(
    ParsedCall, name=names, arguments=st.dictionaries(keys, simple_values, max_size=3)
)
"""Calls on which no parser has a rule of its own: no edge of space, no text that is JSON, too."""


@functools.cache
def tokenizer_of(family: str) -> Tokenizer:
    return Tokenizer.from_file(str(family_folder(family) / "tokenizer.json"))


@functools.cache
def compiled(family: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(
        value, ensure_ascii=False, **options
    )
    return environment.from_string(template_of(family))


def sampled_text(family: str, turn: Sequence[ParsedCall]) -> str:
    """What the family's template says that the policy sampled for these calls."""
    config = json.loads((family_folder(family) / "tokenizer_config.json").read_text())
    tokens = {name: config[name] for name in ("bos_token", "eos_token") if name in config}
    opening = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    written = [
        {
            "id": "abcdefghi",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in turn
    ]
    answer = {"role": "assistant", "content": "", "tool_calls": written}
    prompt = compiled(family).render(messages=opening, add_generation_prompt=True, **tokens)
    text = compiled(family).render(messages=[*opening, answer], **tokens)
    assert text.startswith(prompt), "the template rewrites its own generation prompt"
    return text[len(prompt) :].rstrip("\n").removesuffix(config["eos_token"])


def as_meant(tool_format: ToolFormat, turn: Sequence[ParsedCall]) -> list[ParsedCall]:
    return [as_texts(call) if tool_format.name in TYPELESS else call for call in turn]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_format_of_a_family_is_found_in_its_template(family: str) -> None:
    added = tokenizer_of(family).get_added_tokens_decoder().values()
    tool_format = registry.find_tool_format(template_of(family), [str(token) for token in added])
    assert (tool_format.name if tool_format else "") == FAMILIES[family].tool_format


@pytest.mark.parametrize(
    ("shown", "name"),
    [
        ("<tool_call>{{ name }}\n<arg_key>{{ k }}</arg_key>\n<arg_value>", "glm"),
        ("<tool_call><function={{ name }}><parameter={{ k }}>", "xml"),
        ('<tool_call>\n{"name": "{{ name }}", "arguments": {{ a | tojson }}}', "hermes"),
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ n }}\n```json\n", "deepseek_fenced"),
        ('<｜DSML｜function_calls>\n<｜DSML｜invoke name="{{ n }}">', "deepseek_v4"),
        ("{{ message.content }}", ""),
    ],
)
def test_a_format_is_known_by_what_a_template_shows(shown: str, name: str) -> None:
    tool_format = registry.find_tool_format(shown, [])
    assert (tool_format.name if tool_format else "") == name


@pytest.mark.parametrize("family", WITH_TOOLS)
@given(turn=st.lists(calls, min_size=1, max_size=3))
def test_what_a_template_writes_for_calls_is_read_as_these_calls(
    family: str, turn: list[ParsedCall]
) -> None:
    tool_format = FORMATS[FAMILIES[family].tool_format]
    turn = turn[:1] if family == "llama3" else turn  # its template refuses more
    text = sampled_text(family, turn)
    text = re.sub(r"\A\s*(?:<think>.*?)?</think>", "", text, count=1, flags=re.DOTALL)
    parsed = tool_format.parse(text)
    assert list(parsed.calls) == as_meant(tool_format, turn)
    assert not parsed.message.strip()


class ForRenderers:
    """Our tokenizer with the methods that renderers' parsers call."""

    unk_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def convert_tokens_to_ids(self, token: str) -> int | None:
        token_id: int | None = self.tokenizer.token_to_id(token)
        return token_id

    def decode(self, ids: list[int], **_: object) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def encode(self, text: str, **_: object) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def by_name(parser: str) -> Callable[[Any, list[int]], Any]:
    parsers = pytest.importorskip("renderers.parsers")
    return lambda tokenizer, ids: parsers.TOOL_PARSERS[parser](tokenizer).extract(ids)[1]


def read_by_renderers(family: str, text: str) -> list[ParsedCall]:
    """The calls that renderers reads in the same tokens."""
    parsing = pytest.importorskip("renderers.parsing")
    tokenizer = ForRenderers(tokenizer_of(family))
    ids = tokenizer.encode(text)
    match FAMILIES[family].tool_format:
        case "hermes":
            found = by_name("qwen3")(tokenizer, ids)
        case "xml":
            found = by_name("qwen3.5")(tokenizer, ids)
        case "llama3":
            found = parsing.parse_llama_3(tokenizer, ids, stop_ids=set()).tool_calls
        case _:
            think = [tokenizer.convert_tokens_to_ids(tag) for tag in ("<think>", "</think>")]
            found = parsing.parse_deepseek_v4(
                tokenizer,
                ids,
                stop_ids=set(),
                thinking_enabled=False,
                think_start_id=think[0],
                think_end_id=think[1],
            ).tool_calls
    assert not [each for each in found if each.name is None]
    return [ParsedCall(name=each.name, arguments=each.arguments) for each in found]


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3", "qwen3.6", "llama3", "deepseek-v4"])
@given(turn=st.lists(simple_calls, min_size=1, max_size=3))
def test_renderers_reads_the_same_calls(family: str, turn: list[ParsedCall]) -> None:
    tool_format = FORMATS[FAMILIES[family].tool_format]
    turn = turn[:1] if family == "llama3" else turn  # it reads no second call
    text = tool_format.render(turn)
    theirs = read_by_renderers(family, text)
    assert as_meant(tool_format, theirs) == list(tool_format.parse(text).calls)


@given(call=simple_calls)
def test_llama_models_reads_the_same_call(call: ParsedCall) -> None:
    tool_utils = pytest.importorskip("llama_models.llama3.tool_utils")
    text = FORMATS["llama3"].render([call])
    name, arguments = tool_utils.ToolUtils.maybe_extract_custom_tool_call(text)
    assert FORMATS["llama3"].parse(text).calls == (ParsedCall(name=name, arguments=arguments),)


@given(call=calls)
def test_what_llama_models_writes_is_read(call: ParsedCall) -> None:
    types = pytest.importorskip("llama_models.datatypes")
    tool_utils = pytest.importorskip("llama_models.llama3.tool_utils")
    theirs = types.ToolCall.model_construct(
        call_id="x", tool_name=call.name, arguments=dict(call.arguments)
    )
    text = tool_utils.ToolUtils.encode_tool_call(theirs, types.ToolPromptFormat.json)
    assert FORMATS["llama3"].parse(text).calls == (call,)


@functools.cache
def mistral_tokenizer(version: str) -> Any:
    """mistral-common's tokenizer of one version of the format."""
    tekken = pytest.importorskip("mistral_common.tokens.tokenizers.tekken")
    base = pytest.importorskip("mistral_common.tokens.tokenizers.base")
    instruct = pytest.importorskip("mistral_common.tokens.tokenizers.instruct")
    path = package_file("mistral_common", "data/tekken_240911.json")
    if version == "v3":
        return instruct.InstructTokenizerV3(tekken.Tekkenizer.from_file(path))
    model = json.loads(path.read_text())
    special = [
        {"rank": rank, "token_str": token, "is_control": True}
        for rank, token in enumerate(chat_families.MISTRAL_TOKENS)
    ]
    tokenizer = tekken.Tekkenizer(
        model["vocab"],
        special,
        model["config"]["pattern"],
        model["config"]["default_vocab_size"],
        model["config"]["default_num_special_tokens"],
        base.TokenizerVersion(version),
    )
    classes = {"v11": instruct.InstructTokenizerV11, "v13": instruct.InstructTokenizerV13}
    return classes[version](tokenizer)


@pytest.mark.parametrize("version", ["v3", "v11", "v13"])
@given(turn=st.lists(calls, min_size=1, max_size=3))
def test_what_mistral_common_writes_is_read(version: str, turn: list[ParsedCall]) -> None:
    messages = pytest.importorskip("mistral_common.protocol.instruct.messages")
    tools = pytest.importorskip("mistral_common.protocol.instruct.tool_calls")
    base = pytest.importorskip("mistral_common.tokens.tokenizers.base")
    written = [
        tools.ToolCall(
            id="abcdefghi",
            function=tools.FunctionCall(name=call.name, arguments=json.dumps(call.arguments)),
        )
        for call in turn
    ]
    tokenizer = mistral_tokenizer(version)
    message = messages.AssistantMessage(content=None, tool_calls=written)
    ids = tokenizer.encode_assistant_message(message, False)  # noqa: FBT003 - their signature
    text = tokenizer.tokenizer.decode(ids, base.SpecialTokenPolicy.KEEP).removesuffix("</s>")
    assert list(FORMATS["mistral"].parse(text).calls) == turn


VLLM = {
    "hermes": ("qwen3", "hermes"),
    "xml": ("qwen3.6", "qwen3_coder"),
    "llama3": ("llama3", "llama3_json"),
    "mistral": ("mistral", "mistral"),
    "mistral_list": ("mistral-nemo", "mistral"),
    "deepseek": ("deepseek-v3.1", "deepseek_v31"),
    "deepseek_fenced": ("deepseek-v3.1", "deepseek_v3"),
    "deepseek_v4": ("deepseek-v4", "deepseek_v4"),
    "glm": ("qwen3", "glm47"),
}
"""Family whose tokenizer serves, and the name of vLLM's parser."""


@functools.cache
def vllm_parser(name: str) -> Callable[[str], Any]:
    manager = pytest.importorskip("vllm.tool_parsers.abstract_tool_parser").ToolParserManager
    protocol = pytest.importorskip("vllm.entrypoints.openai.chat_completion.protocol")
    auto = pytest.importorskip("transformers").AutoTokenizer
    cached = pytest.importorskip("vllm.tokenizers.hf").get_cached_tokenizer
    family, parser = VLLM[name]
    properties = {key: {"type": ["string", "integer", "array"]} for key in ("a", "b", "path")}
    tools = [
        {
            "type": "function",
            "function": {
                "name": tool,
                "parameters": {"type": "object", "properties": properties},
            },
        }
        for tool in ("f", "g", "read_file")
    ]
    question = [{"role": "user", "content": "x"}]
    request = protocol.ChatCompletionRequest(messages=question, model="m", tools=tools)
    tokenizer = cached(auto.from_pretrained(family_folder(family)))

    def parse(text: str) -> Any:
        # It keeps state, so each text gets its own.
        engine = manager.get_tool_parser(parser)(tokenizer, request.tools)
        return engine.extract_tool_calls(text, request)

    return parse


@pytest.mark.long  # vLLM takes twenty seconds to import
@pytest.mark.parametrize("name", VLLM)
@given(turn=st.lists(simple_calls, min_size=1, max_size=3), message=st.sampled_from(["", "Hm."]))
def test_vllm_reads_the_same_calls(name: str, turn: list[ParsedCall], message: str) -> None:
    tool_format = FORMATS[name]
    text = tool_format.render(turn, "" if name == "llama3" else message)
    theirs = vllm_parser(name)(text)
    found = [
        ParsedCall(name=each.function.name, arguments=json.loads(each.function.arguments))
        for each in theirs.tool_calls
    ]
    assert as_meant(tool_format, found) == list(tool_format.parse(text).calls)
