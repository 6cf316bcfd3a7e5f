"""A chat template with tools in the form of Hermes, and calls as a policy writes them in it."""

import json

TOOLS = (
    "{% if tools %}<|system|>{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|end|>{% endif %}"
)
CALLS = (
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}"
)
MESSAGES = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "<|tool|>{{ m.name }}: <tool_response>{{ m.content }}</tool_response><|end|>"
    "{% else %}<|{{ m.role }}|>{{ m.content }}CALLS<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEMPLATE = TOOLS + MESSAGES.replace("CALLS", CALLS)


def write_call(name: str, **arguments: object) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"
