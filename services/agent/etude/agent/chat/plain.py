"""`python -m etude.agent.chat.plain`: print the Plain template, for models without one."""

import sys

CHAT_TEMPLATE = (
    "{%- macro text(content) -%}"
    "{%- if content is string -%}{{ content }}"
    "{%- else -%}{%- for part in content or [] -%}{{ part.text }}{%- endfor -%}{%- endif -%}"
    "{%- endmacro -%}"
    "{%- macro value(given) -%}"
    "{%- set shown = given if given is string else given | tojson -%}"
    "{%- set edge = '\\n' if shown[:1] == '\\n' or shown[-1:] == '\\n' else '' -%}"
    "{{ edge }}{{ shown }}{{ edge }}"
    "{%- endmacro -%}"
    "{%- for message in messages -%}"
    "{%- if message.role == 'tool' -%}"
    "{%- if loop.first or loop.previtem.role != 'tool' -%}<|tool|>{%- endif -%}"
    "{%- if message.content is string or message.content[0] is mapping -%}"
    "<tool_response>{{ text(message.content) }}</tool_response>"
    "{%- else -%}"
    "{%- for result in message.content or [] -%}"
    "<tool_response>{{ result }}</tool_response>"
    "{%- endfor -%}"
    "{%- endif -%}"
    "{%- if loop.last or loop.nextitem.role != 'tool' -%}<|end|>{%- endif -%}"
    "{%- else -%}"
    "<|{{ message.role }}|>{{ text(message.content) }}"
    "{%- for call in message.tool_calls or [] -%}"
    "<tool_call><function={{ call.function.name }}>"
    "{%- for name, given in call.function.arguments.items() -%}"
    "<parameter={{ name }}>{{ value(given) }}</parameter>"
    "{%- endfor -%}"
    "</function></tool_call>"
    "{%- endfor -%}"
    "<|end|>"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
"""Roles and ends are tokens; several tool messages in a row are one tool turn."""

END = "<|end|>"
"""Token that ends a turn."""

LAYOUT_TOKENS = (
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    END,
    "<tool_response>",
    "</tool_response>",
)
"""Tokens that the tokenizer must have for the Plain template, as one id each."""


def main() -> None:
    """Print the template."""
    sys.stdout.write(CHAT_TEMPLATE + "\n")


if __name__ == "__main__":
    main()
