"""Requests of mined tasks: what a user would say who saw the behaviour and not the change. Pure."""

import random
import re
from collections.abc import Iterable, Mapping

from etude.envserver.tasks.mining.mutations import Mutation

MAX_CHARACTERS = 400
_BROKEN = (
    "{name} does not behave as it should: {symptom}.{doc} Please find the cause and repair it.",
    "Since a recent change {symptom}, when I use {name}.{doc} Can you fix that?",
    "Something is wrong with {name}: {symptom}.{doc} Please make it work again.",
)
_MISSING = (
    "{name} has lost its implementation and only raises an error.{doc} Please write it again, as"
    " the rest of the code expects it.",
    "{name} is not implemented.{doc} Please implement it so that the code which uses it works.",
)
_SENTENCE = re.compile(r"(.+?[.!?])(?:\s|$)")
_MARKUP = re.compile(r":\w+(?::\w+)?:`[~.!]?([^`]*)`|``?([^`]*)``?")


def write_request(
    mutation: Mutation, errors: Mapping[str, int], hidden: Iterable[str], *, seed: int
) -> str:
    """Write the request of a task, of at most 400 characters.

    Args:
        mutation: change that broke the function.
        errors: classes of errors in the log of the failing tests, with their counts.
        hidden: texts that it must not hold: names of hidden tests, lines of the solution.
        seed: chooses the wording.
    """
    rng = random.Random(f"{seed} {mutation.function.path} {mutation.start}")  # noqa: S311
    form = rng.choice(_MISSING if mutation.kind == "Body" else _BROKEN)
    symptom = _describe_symptom(errors)
    name = f"`{mutation.function.name}`"
    secrets = [text for text in hidden if text]
    sentence = summarise_documentation(mutation.function.documentation)
    doc = f" It is documented as “{sentence}”" if sentence else ""
    for used in (doc, ""):
        text = form.format(name=name, symptom=symptom, doc=used)
        if len(text) <= MAX_CHARACTERS and not any(secret in text for secret in secrets):
            return text
    return f"Something in {mutation.function.path} does not work any more. Please repair it."[
        :MAX_CHARACTERS
    ]


def summarise_documentation(text: str) -> str:
    """First sentence of a documentation as one line of plain text; empty if there is none."""
    paragraph = " ".join(re.split(r"\n\s*\n", text.strip(), maxsplit=1)[0].split())
    plain = _MARKUP.sub(lambda match: match[1] or match[2] or "", paragraph)
    match = _SENTENCE.match(plain)
    return (match[1] if match else plain)[:220].strip()


def _describe_symptom(errors: Mapping[str, int]) -> str:
    named = {name: count for name, count in errors.items() if name != "AssertionError"}
    if not named or sum(named.values()) <= errors.get("AssertionError", 0):
        return "results are wrong"
    most = max(named, key=lambda name: (named[name], name))
    return "it panics" if most == "panic" else f"I get {most}"
