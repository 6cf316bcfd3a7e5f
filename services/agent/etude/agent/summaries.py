"""Self-summaries: the policy sums up a full context, and goes on from the summary in a new one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from etude.agent.tools.base import Access, Tool, ToolOutcome
from etude.agent.workspace import Workspace

REQUEST = """\
Your context is nearly full. Write down what you need to go on without it: what you have found, \
what you have changed, in which files, what is still to do, and what you would do next. Only this \
text and the requests of the user are kept. Results that are left out have no room here. Call no \
tool.\
"""
"""Message of the harness that asks for a summary."""
LEFT_OUT = "[left out]"
"""Result of a call in the context that is summed up, where the result itself has no room."""
REQUEST_TOKENS = 512
"""Room for the request and for results that are left out: tokenizers need 70 to 130 for it, and 10
for each result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryLimits:
    """Lengths of contexts and of summaries."""

    context_tokens: int
    """Tokens of one context, of the summary at its end too."""
    max_tokens: int
    """Tokens of one summary, with its thinking."""
    request_tokens: int = REQUEST_TOKENS
    """Room for the request and for results that are left out; a tokenizer that is known needs
    less."""

    def most_opening(self, *, turn_tokens: int) -> int:
        """Most tokens of a first prompt that leave each context room for a turn.

        A later context opens with the prompt and a summary; at its end it needs room for another.
        """
        return self.context_tokens - turn_tokens - 2 * self.max_tokens - self.request_tokens

    def is_due(self, num_tokens: int, *, turn_tokens: int) -> bool:
        """True if a context has no room for another turn and a summary after it.

        Args:
            num_tokens: of the context so far.
            turn_tokens: that one turn may sample.
        """
        reserved = turn_tokens + self.request_tokens + self.max_tokens
        return num_tokens + reserved > self.context_tokens


class SummarizeContext(Tool):
    """Replace your context by a summary that you write next, to make room for further work."""

    access: ClassVar[Access] = Access.READ

    @override
    async def run(self, workspace: Workspace) -> ToolOutcome:
        return RECEIVED


RECEIVED = ToolOutcome(content="Write the summary.")
"""Result of the call: the harness answers it, not the environment."""
TOOL_NAME = "summarize_context"


def write_continuation(requests: Sequence[str], summary: str, results: Sequence[str]) -> str:
    """Write the first message of a context that follows a summary.

    Args:
        requests: of the user, in the order in which they were made.
        summary: that the policy wrote.
        results: of its last calls, which the summary does not cover.
    """
    parts = [
        *requests,
        f"You have worked on this before. Your summary of it:\n<summary>\n{summary}\n</summary>",
    ]
    if results:
        parts.append("\n".join(["Results of your last calls:", *results]))
    parts.append("Go on from there.")
    return "\n\n".join(parts)
