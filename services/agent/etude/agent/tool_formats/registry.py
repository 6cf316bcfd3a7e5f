"""The tool format of a model, found in its chat template."""

from collections.abc import Callable, Collection
from typing import NamedTuple

from etude.agent.tool_formats import deepseek, deepseek_v4, glm, hermes, llama3, mistral, xml
from etude.agent.tool_formats.base import ToolFormat


class Detection(NamedTuple):
    """A format and the rule that tells it from the others."""

    tool_format: ToolFormat
    is_shown_by: Callable[[str, Collection[str]], bool]
    """True for a chat template, and a tokenizer's added tokens, of a model that writes it."""


DETECTIONS = (
    Detection(deepseek_v4.DeepSeekV4Format(), deepseek_v4.is_deepseek_v4),
    Detection(deepseek.DeepSeekFormat(), deepseek.is_deepseek),
    Detection(deepseek.DeepSeekFencedFormat(), deepseek.is_deepseek_fenced),
    Detection(mistral.MistralFormat(), mistral.is_mistral),
    Detection(mistral.MistralListFormat(), mistral.is_mistral_list),
    Detection(glm.GlmFormat(), glm.is_glm),
    Detection(xml.XmlFormat(), xml.is_xml),
    Detection(hermes.HermesFormat(), hermes.is_hermes),
    Detection(llama3.Llama3Format(), llama3.is_llama3),
)
"""In the order in which they are tried."""


def find_tool_format(template: str, added_tokens: Collection[str]) -> ToolFormat | None:
    """The format in which a model was taught to write calls; None when its template shows none.

    Args:
        template: the model's chat template.
        added_tokens: texts of the tokens that its tokenizer adds to the vocabulary.
    """
    for tool_format, is_shown_by in DETECTIONS:
        if is_shown_by(template, added_tokens):
            return tool_format
    return None
