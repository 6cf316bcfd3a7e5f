"""Changes of our objects, made from their schemas: the same ones for the same seed."""

import copy
import json
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.mutations import kubernetes_values, schema
from tests.mutations.schema import Place, Steps
from tests.mutations.values import ABSENT, Raw, values
from typing_extensions import override

from etude.common.api import crd


class Mutation(NamedTuple):
    """One change of the base object of a kind."""

    kind: crd.Kind
    steps: Steps
    what: str
    value: Any

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
        return f"{self.kind.name} {self.path}: {self.what} ({shown[:80]})"

    def body(self) -> dict[str, Any]:
        """The changed object."""
        whole = schema.base(self.kind)
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


def mutations(kind: crd.Kind, seed: int) -> list[Mutation]:
    """Every change of a kind that is tried."""
    whole = schema.base(kind)
    made = [
        *(Mutation(kind, ("metadata",), *each) for each in kubernetes_values.METADATA),
        *(each for place in schema.places(kind) for each in _at(kind, place, whole, seed)),
    ]
    unchanged = dumped(whole)
    by_text = {dumped(each.body()): each for each in made}
    by_text.pop(unchanged, None)
    return list(by_text.values())


def _at(kind: crd.Kind, place: Place, whole: Any, seed: int) -> Iterator[Mutation]:
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
