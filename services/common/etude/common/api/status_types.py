"""Types that the statuses of all kinds are made of."""

from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from etude.common.api.meta import Condition, Model, UniqueBy

Figure = Annotated[str, Field(max_length=32, pattern=r"^-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?$")]
"""A decimal as text; may be negative."""

Time = Annotated[str, Field(max_length=64)]
"""RFC 3339, UTC."""

Short = Annotated[str, Field(max_length=253)]
Count = Annotated[int, Field(ge=0)]
Conditions = Annotated[tuple[Condition, ...], Field(max_length=16), UniqueBy("type")]


class StatusModel(Model):
    """A status that tolerates fields which a newer operator wrote."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="ignore")


class Resolved(StatusModel):
    """Defaults as they were at acceptance, so that an upgrade of the operator changes no run."""

    images: dict[str, Annotated[str, Field(max_length=512)]] = Field(
        default_factory=dict, max_length=8
    )
    """Image of each role that names none."""
    model_uri: Annotated[str, Field(max_length=1024)] | None = None
    """Model folder of the checkpoint that model.checkpointRef named."""
