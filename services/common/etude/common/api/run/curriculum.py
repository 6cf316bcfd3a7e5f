"""Curriculum of a phase: which untrained tasks come next."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, JsonValue, ValidationError

from etude.common import extensions
from etude.common.api.meta import Fraction, Model
from etude.common.errors import UserError


class SolveRateBand(Model):
    """Tasks of the label whose mean reward is nearest to target come first.

    A label is metadata.difficulty of a task.toml. A label of which no task was trained yet counts
    as one that is at the target, so that each is tried; tasks of equal labels keep the order of
    the phase's seed.
    """

    target: Fraction = "0.5"
    """Mean reward at which groups of siblings differ most."""


PARAMETERS: Mapping[str, type[Model]] = {"SolveRateBand": SolveRateBand}
"""Model of the parameters of each of Etude's curricula, by its name in a manifest."""
CURRICULUM = rf"^({'|'.join(PARAMETERS)}|{extensions.NAME})$"
"""Names in a manifest: Etude's own, and those that an installed package registers."""


class CurriculumChoice(Model):
    """Order in which the tasks of a phase come, by what was trained so far."""

    name: Annotated[str, Field(max_length=128, pattern=CURRICULUM)]
    """SolveRateBand: labels whose mean reward is nearest to a target first. acme.Ladder is what an
    installed package registers so."""
    parameters: dict[str, JsonValue] = Field(default_factory=dict, max_length=64)
    """Of the curriculum, each with its default."""


def can_check_curriculum(name: str) -> bool:
    """True if the parameters of a curriculum can be checked in this Python environment."""
    return not extensions.is_extension(name) or extensions.is_installed(extensions.CURRICULA, name)


def check_curriculum(name: str, parameters: Mapping[str, JsonValue]) -> Model:
    """The parameters as their model, defaults filled in.

    Raises:
        ValueError: no such curriculum, its package is not installed or broken, or a parameter that
            it does not have or does not accept; the message names it.
    """
    try:
        return find_model(name).model_validate(dict(parameters))
    except ValidationError as cause:
        found = "; ".join(
            ".".join(("parameters", *map(str, error["loc"]))) + f": {error['msg']}"
            for error in cause.errors()
        )
        raise ValueError(found) from cause


def find_model(name: str) -> type[Model]:
    """Find the model of a curriculum's parameters.

    Raises:
        ValueError: no such curriculum, or its package is not installed or broken.
    """
    if not extensions.is_extension(name):
        if name not in PARAMETERS:
            raise ValueError(f"name: {name!r} is not one of {', '.join(PARAMETERS)}")
        return PARAMETERS[name]
    try:
        # Any: the class of curricula is the trainer's, which checks it.
        found: Any = extensions.load_extension(extensions.CURRICULA, name, object)
    except UserError as error:
        raise ValueError(f"name: {error.problem.what}; {error.problem.fix}") from error
    model = getattr(found, "parameters", None)
    if isinstance(model, type) and issubclass(model, Model):
        return model
    raise ValueError(f"name: {name} has no model of its parameters")
