"""Base of all API models: rules, metadata, conditions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, GetCoreSchemaHandler, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema, core_schema

from etude.common.api.field_docs import DocumentedModel
from etude.common.hub_uri import PATTERN as HUB_URI

GROUP = "etude.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

NAME = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
SUBDOMAIN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
OBJECT = rf"^{SUBDOMAIN}$"
QUALIFIED = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
DECIMAL = r"^[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]{1,2})?$"

Name = Annotated[str, Field(min_length=1, max_length=40, pattern=NAME)]
"""An RFC 1035 label short enough for every child's name."""

ObjectName = Annotated[str, Field(min_length=1, max_length=253, pattern=OBJECT)]
"""What Kubernetes takes for the name of most objects: a DNS subdomain."""

Uri = Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^(file|s3)://")]
MODEL_URI = rf"^(file|s3)://|{HUB_URI}"
ModelUri = Annotated[str, Field(min_length=1, max_length=1024, pattern=MODEL_URI)]
"""A folder or prefix, or a model on a hub."""

Fraction = Annotated[str, Field(min_length=1, max_length=32, pattern=DECIMAL)]
"""A non-negative decimal as text: floats do not survive every JSON encoder unchanged."""

LabelValue = Annotated[
    str, Field(max_length=63, pattern=r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$")
]
"""A value of a Kubernetes label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One cross-field rule, said twice: in CEL for the API server, in Python for everyone else."""

    cel: str
    holds: Callable[..., bool]
    message: str
    fix: str
    """What to type instead, for `etude lint`."""
    field_path: str = ""
    """Relative to the model, with a leading dot, as CRDs want it."""


class BrokenRulesError(ValueError):
    """All rules that one object breaks."""

    def __init__(self, rules: tuple[Rule, ...]) -> None:
        super().__init__(
            "; ".join(f"{r.field_path}: {r.message}" if r.field_path else r.message for r in rules)
        )
        self.rules = rules


class Model(DocumentedModel):
    """A frozen object of the API that refuses unknown fields and broken rules."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
    )
    rules: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="after")
    def _rules_hold(self) -> Self:
        broken = tuple(rule for rule in self.rules if not rule.holds(self))
        if broken:
            raise BrokenRulesError(broken)
        return self

    @classmethod
    def parse_known_fields(cls, content: object) -> Self:
        """Parse an object that another release may have written; unknown fields are ignored.

        Raises:
            ValidationError: what it knows of it is wrong.
        """
        return cls.model_validate(content, extra="ignore")

    def to_json(self) -> dict[str, object]:
        """This object as Kubernetes shows it: camelCase, absent fields left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class RepeatedError(ValueError):
    """An item of a list has the key of an earlier one."""

    def __init__(self, key: str, value: object, index: int) -> None:
        super().__init__(f"{key} {value!r} is given twice")
        self.key = key
        self.index = index


class UniqueBy:
    """Marks a list whose items are told apart by one field, and refuses a repeated one."""

    def __init__(self, key: str) -> None:
        self.key = key

    def __get_pydantic_core_schema__(
        self, source: type[Any], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(
            self._refuse_repeated,
            handler(source),
            metadata={
                "pydantic_js_extra": {
                    "x-kubernetes-list-type": "map",
                    "x-kubernetes-list-map-keys": [self.key],
                }
            },
        )

    def _refuse_repeated(self, items: tuple[Any, ...]) -> tuple[Any, ...]:
        seen: set[object] = set()
        for index, item in enumerate(items):
            value = getattr(item, self.key)
            if value in seen:
                raise RepeatedError(self.key, value, index)
            seen.add(value)
        return items


NAMED = UniqueBy("name")


def number(text: str) -> float:
    """A decimal string of the API as a float."""
    return float(Decimal(text))


class OwnerReference(DocumentedModel):
    """Reference to the owner of an object."""

    model_config = ConfigDict(
        frozen=True, extra="ignore", alias_generator=to_camel, validate_by_name=True
    )

    api_version: str
    kind: str
    name: str
    uid: str
    controller: bool = False


class ObjectMeta(DocumentedModel):
    """The part of Kubernetes' object metadata that we read."""

    model_config = ConfigDict(
        frozen=True, extra="ignore", alias_generator=to_camel, validate_by_name=True
    )

    name: Name
    namespace: str = "default"
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    labels: Mapping[str, str] = Field(default_factory=dict)
    annotations: Mapping[str, str] = Field(default_factory=dict)
    finalizers: tuple[str, ...] = ()
    owner_references: tuple[OwnerReference, ...] = ()


class Condition(Model):
    """One observed fact about an object, as Kubernetes writes it."""

    type: Annotated[str, Field(max_length=64)]
    """Name of the fact."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: Annotated[str, Field(max_length=64)]
    """Stable PascalCase code, listed in the reasons reference."""
    message: Annotated[str, Field(max_length=2048)] = ""
    """A sentence for people."""
    observed_generation: Annotated[int, Field(ge=0)] = 0
    """Generation of the spec that this was observed for."""
    last_transition_time: Annotated[str, Field(max_length=64)] = ""
    """When status last changed, RFC 3339."""


class NameRef(Model):
    """A reference to an object of the same namespace."""

    name: ObjectName
    """Its metadata.name."""
