"""Changes of our objects, made from their schemas: the same ones for the same seed."""

import copy
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tests.harness.mutations import kubernetes_values, schema
from tests.harness.mutations.schema import Place, Steps
from tests.harness.mutations.values import ABSENT, Raw, values
from typing_extensions import override

from etude.common.api.schema import crd


class Mutation(NamedTuple):
    """One change of the base object of a kind."""

    kind: crd.CrdKind
    steps: Steps
    what: str
    value: Any
    variant: str = ""
    """Of the base that is changed."""

    @property
    def path(self) -> str:
        """What is changed, as the API server writes it."""
        return schema.dotted(self.steps)

    @property
    def top(self) -> str:
        """The part of the spec that is changed; nothing for a change of the metadata."""
        return str(self.steps[1]) if self.steps[0] == "spec" and len(self.steps) > 1 else ""

    @override
    def __str__(self) -> str:
        shown = "absent" if self.value is ABSENT else dumped(self.value)
        of = f"{self.kind.name} {self.variant}".strip()
        return f"{of} {self.path}: {self.what} ({shown[:80]})"

    def body(self) -> dict[str, Any]:
        """The changed object."""
        whole = schema.base(self.kind, self.variant)
        if self.steps[0] == "metadata":
            whole["metadata"] |= copy.deepcopy(self.value)
        elif self.value is ABSENT:
            above = schema.found(whole, self.steps[:-1])
            if isinstance(above, dict):
                above.pop(self.steps[-1], None)
        elif self.steps == ("spec",):
            whole["spec"] = copy.deepcopy(self.value)
        else:
            schema.put(self.kind, whole, self.steps, copy.deepcopy(self.value))
        return whole


def dumped(value: Any) -> str:
    """JSON, with numbers as they were written."""
    marks: list[Raw] = []

    def marked(inner: Any) -> Any:
        if isinstance(inner, Raw):
            marks.append(inner)
            return f"\u0001raw-{len(marks) - 1}\u0001"
        if isinstance(inner, dict):
            return {key: marked(each) for key, each in inner.items()}
        return [marked(each) for each in inner] if isinstance(inner, list) else inner

    text = json.dumps(marked(value))
    for number, mark in enumerate(marks):
        text = text.replace(f'"\\u0001raw-{number}\\u0001"', mark)
    return text


def mutations(kind: crd.CrdKind, seed: int) -> list[Mutation]:
    """Every change of a kind that is tried."""
    made = [
        *(Mutation(kind, ("metadata",), *each) for each in kubernetes_values.METADATA),
        *(
            each._replace(variant=variant)
            for variant in schema.variants(kind)
            for place in schema.places(kind, variant)
            for each in _at(kind, place, schema.base(kind, variant), seed)
        ),
    ]
    by_text = {dumped(each.body()): each for each in made}
    for variant in schema.variants(kind):
        by_text.pop(dumped(schema.base(kind, variant)), None)
    return list(by_text.values())


def _at(kind: crd.CrdKind, place: Place, whole: Any, seed: int) -> Iterator[Mutation]:
    rng = random.Random(f"{seed}/{kind.name}/{place.path}")
    present = schema.found(whole, place.steps)
    if present is not None and not isinstance(place.steps[-1], int):
        yield Mutation(kind, place.steps, "nothing", ABSENT)
    for what, value in (
        *values(place.node, present, rng),
        *kubernetes_values.known(place.steps, place.path),
    ):
        yield Mutation(kind, place.steps, what, value)


def sample(made: list[Mutation], count: int, seed: int) -> list[Mutation]:
    """A few of them, the same for the same seed."""
    return random.Random(seed).sample(made, min(count, len(made)))


def shares(sizes: Sequence[int], count: int) -> list[int]:
    """How many of lists of these sizes to take: of each the same, as far as it has them."""
    taken = [0] * len(sizes)
    for left, index in enumerate(sorted(range(len(sizes)), key=sizes.__getitem__)):
        taken[index] = min(sizes[index], (count - sum(taken)) // (len(sizes) - left))
    return taken


def changed(mutation: Mutation) -> tuple[str, ...]:
    """The names that a refusal may say for the change: that of the field, or of one above it that
    is there for it alone."""
    whole = schema.base(mutation.kind, mutation.variant)
    steps = mutation.steps
    made = next((n for n in range(2, len(steps)) if schema.found(whole, steps[:n]) is None), None)
    first = len(steps) if made is None else made
    named = [step for step in steps[first - 1 :] if isinstance(step, str)]
    return tuple(named) or tuple([step for step in steps if isinstance(step, str)][-1:])
