"""Context extension: more positions for a model than it was trained with."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from etude.common.api.meta import Model, Rule

_FOR_OTHER_FACTORS = {"type", "attention_factor"}
"""RoPE parameters that an extension replaces or that follow from its factor."""


class ContextExtension(Model):
    """Positions of the model from one phase on, by other frequencies of its rotary embedding."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.ropeScaling != 'None' || has(self.ropeTheta)",
            holds=lambda s: s.rope_scaling != "None" or s.rope_theta is not None,
            message="ropeScaling None needs ropeTheta: with the frequencies as they are, the model"
            " has no use for further positions",
            fix="set ropeTheta, for example to ten times the model's, or ropeScaling: Yarn",
            field_path=".ropeTheta",
        ),
    )

    positions: Annotated[int, Field(ge=16, le=10_000_000)]
    """Longest sequence of the model from this phase on, in tokens."""
    rope_scaling: Literal["Yarn", "None"] = "Yarn"
    """Change of RoPE's frequencies: Yarn divides the slow ones by positions over trained positions,
    None leaves them to ropeTheta."""
    rope_theta: Annotated[int, Field(ge=1_000, le=1_000_000_000_000)] | None = None
    """Base of RoPE's frequencies; the model folder's unless set."""


def extend_rope(
    rope: Mapping[str, Any], extension: ContextExtension, *, positions: int
) -> dict[str, Any]:
    """RoPE parameters of a model with more positions, in the words of transformers.

    Source of Yarn: https://arxiv.org/abs/2309.00071.

    Args:
        rope: parameters of the model folder, of which an earlier extension may be part.
        extension: of the folder's positions.
        positions: of the folder.

    Raises:
        ValueError: the extension does not fit these parameters.
    """
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError("the model's layers have RoPE parameters of their own")
    if rope.get("mscale_all_dim"):
        raise ValueError("the model's attention is scaled by RoPE parameters (mscale_all_dim)")
    if extension.positions < positions:
        raise ValueError(f"the model has {positions} positions already")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default" and (kind, extension.rope_scaling) != ("yarn", "Yarn"):
        raise ValueError(f"the model's RoPE is of type {kind}, which cannot be scaled again")
    extended = {name: v for name, v in rope.items() if name not in _FOR_OTHER_FACTORS}
    if extension.rope_theta is not None:
        extended["rope_theta"] = float(extension.rope_theta)
    if extension.rope_scaling == "None":
        return extended | {"rope_type": "default"}
    trained = positions if kind == "default" else rope.get("original_max_position_embeddings")
    if type(trained) is not int or trained < 1:
        raise ValueError("the model's RoPE lacks original_max_position_embeddings")
    return extended | {
        "rope_type": "yarn",
        "factor": extension.positions / trained,
        "original_max_position_embeddings": trained,
    }


def check_extension(config: object, extension: ContextExtension) -> None:
    """Check that an extension fits a model's config.json, parsed.

    Raises:
        ValueError: it does not.
    """
    fields = config if isinstance(config, Mapping) else {}
    positions = fields.get("max_position_embeddings")
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if type(positions) is not int or not isinstance(rope, Mapping):
        raise ValueError("the model's config.json lacks max_position_embeddings or RoPE parameters")
    extend_rope(rope, extension, positions=positions)
