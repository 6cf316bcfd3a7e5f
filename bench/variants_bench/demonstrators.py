"""Demonstrators of the warm-up: they note what they see, talk, and mostly sum up without facts.

They speak in the real turn loop, so that a trace has the tokens of a rollout.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from typing_extensions import override

from etude.agent.chat import ChatFormat
from etude.agent.completions import Completion, FinishReason
from etude.agent.local import INITIAL
from etude.agent.summaries import REQUEST
from etude.agent.token_policy import Sampler
from etude.agent.tool_calls import render_call
from etude.agent.trajectory import PolicySpan
from variants_bench.puzzles import ANIMALS, COLOURS, PARTS

KEEPS_FACTS = 0.45
"""Share of summaries with what was found."""
TALKS = 0.5
"""Share of turns with words of no use."""
TALK = "We look at the next part of it now and see. "
_FACTS = {"colour": COLOURS, "animal": ANIMALS}
_REQUEST_END = REQUEST[-40:]


@dataclass(slots=True)
class Demonstrator(Sampler):
    """One demonstrator at work."""

    chat: ChatFormat
    random: Random
    answers_after: int = PARTS - 1
    """Last part that it reads."""

    @override
    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, temperature: float, seed: int | None
    ) -> Completion:
        ids = self.chat.completion(self._speak(self.chat.decode(prompt_ids)))
        finish = FinishReason.STOP if len(ids) <= max_tokens else FinishReason.LENGTH
        ids = ids[:max_tokens]
        span = PolicySpan(0, len(ids), INITIAL, INITIAL)
        return Completion(ids, [-0.5] * len(ids), [span], finish)

    def _speak(self, context: str) -> str:
        """Write the next turn from what the context shows."""
        found = {kind: _find(context, kind) for kind in _FACTS}
        last = max((int(part) for part in re.findall(r"\bp(\d)\b", context)), default=-1)
        talk = TALK if self.random.random() < TALKS else ""
        if _REQUEST_END in context:
            facts = "".join(f"{kind} {word} " for kind, word in found.items() if word)
            kept = facts if self.random.random() < KEEPS_FACTS else ""
            return f"{talk}{kept}at p{last}"
        if last >= self.answers_after:
            facts = " ".join(
                f"{kind} {found[kind] or self.random.choice(words)}"
                for kind, words in _FACTS.items()
            )
            return f"{talk}It is {facts}."
        seen = context.rpartition("<|tool|>")[2]
        notes = "".join(f"{kind} {_find(seen, kind)} " for kind in _FACTS if _find(seen, kind))
        return notes + talk + render_call("read_file", {"path": f"p{last + 1}"})


def _find(context: str, kind: str) -> str:
    matches = re.findall(rf"\b{kind} (\w+)", context)
    return next((word for word in matches if word in _FACTS[kind]), "")
