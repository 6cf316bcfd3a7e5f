"""Texts to learn from: correct repositories, and transcripts of demonstrators at work."""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from random import Random

from etude.agent.chat import Message
from etude.demo import demonstrations
from etude.demo.demonstrations import Demonstration
from etude.demo.problems import Problem

_QUOTES = 2
"""Lines of each file that are quoted after it, as a search would show them."""


def repository_text(problem: Problem, random: Random) -> str:
    """A correct repository: each file under its path, then some of its lines quoted."""
    parts = []
    for path, source in problem.repository.sources(repaired=True).items():
        lines = [line.strip() for line in source.splitlines()]
        quoted = random.sample(lines, min(_QUOTES, len(lines)))
        parts.append("\n".join([path, source.rstrip("\n"), *(f"{path}: {q}" for q in quoted)]))
    return "\n".join(parts)


def demonstrate_all(problems: Iterable[Problem], seed: int) -> list[Demonstration]:
    """One demonstration of each problem, at work in memory one after the other."""

    async def work() -> list[Demonstration]:
        return [
            # Reproducible on purpose, as the problems are.
            await demonstrations.demonstrate(problem, Random(f"etude/{seed}/trace/{i}"))  # noqa: S311
            for i, problem in enumerate(problems)
        ]

    return asyncio.run(work())


def transcript_texts(messages: Sequence[Message]) -> Iterator[str]:
    """The pieces of a transcript that are text to the tokenizer: prompts, turns, results."""
    for message in messages:
        if isinstance(message["content"], str):
            yield message["content"]
        else:
            yield from message["content"]
