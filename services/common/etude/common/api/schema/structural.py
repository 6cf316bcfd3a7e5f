"""Structural schemas, as the API server wants them, from pydantic models."""

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema
from typing_extensions import override

from etude.common.api.meta import Model, Rule

REFERENCE = "#/$defs/{model}"
PRESERVE = "x-kubernetes-preserve-unknown-fields"
LIST_TYPE = "x-kubernetes-list-type"
VALIDATIONS = "x-kubernetes-validations"
KEY_ORDER = (
    *("description", "type", "enum", "default", "format", "pattern", "minLength", "maxLength"),
    *("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "minItems", "maxItems"),
    *("maxProperties", "additionalProperties", "required", "properties", "items"),
)
"""What a reader of a schema wants to see first; extensions come last."""


def schema(model: type[BaseModel], *, defaults: bool = True) -> JsonSchemaValue:
    """The model as a structural schema: references inlined, optional fields merely absent.

    Every bound, description, list type and rule of the model is kept, and every default unless
    told otherwise: a status says what was written, nothing more.

    Source: https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/#specifying-a-structural-schema
    """
    generated = model.model_json_schema(
        by_alias=True, ref_template=REFERENCE, schema_generator=_Generator
    )
    definitions = {
        REFERENCE.format(model=name): body for name, body in generated.pop("$defs", {}).items()
    }
    structural = _structural(generated, definitions)
    return structural if defaults else _without_defaults(structural)


def validations(rules: tuple[Rule, ...]) -> list[dict[str, str]]:
    """Rules as CEL validations; a rule without a field path is about the whole object."""
    return [
        {"rule": rule.cel, "message": rule.message}
        | ({"fieldPath": rule.field_path} if rule.field_path else {})
        for rule in rules
    ]


class _Generator(GenerateJsonSchema):
    """JSON Schema with rules attached, `null` left out and default objects kept."""

    @override
    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    @override
    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        generated = super().model_schema(schema)
        cls = schema["cls"]
        if issubclass(cls, Model) and cls.rules:
            generated[VALIDATIONS] = validations(cls.rules)
        return generated

    @override
    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        generated = super().default_schema(schema)
        factory = schema.get("default_factory")
        if factory is not None and isinstance(factory, type) and issubclass(factory, BaseModel):
            # In full: the API server judges a default by the rules before it fills it up.
            return {**generated, "default": _nonempty_fields(factory())}
        if generated.get("default", ()) in (None, [], {}):
            del generated["default"]  # absent and empty mean the same to us
        return generated


def _nonempty_fields(model: BaseModel) -> dict[str, Any]:
    """Fields of a model that are neither absent nor empty."""
    dumped = model.model_dump(mode="json", by_alias=True, exclude_none=True)
    return {key: value for key, value in dumped.items() if value not in ([], {})}


def _structural(node: JsonSchemaValue, definitions: dict[str, JsonSchemaValue]) -> JsonSchemaValue:
    node = _inlined(node, definitions)
    node.pop("title", None)
    if "const" in node:
        node["enum"] = [node.pop("const")]
    _boolean_exclusive(node, limit="minimum", exclusive="exclusiveMinimum")
    _boolean_exclusive(node, limit="maximum", exclusive="exclusiveMaximum")
    if "properties" in node:
        # Beside properties only pruning is allowed; strict field validation refuses the rest.
        node.pop("additionalProperties", None)
        node["properties"] = {
            name: _structural(value, definitions) for name, value in node["properties"].items()
        }
    if isinstance(node.get("additionalProperties"), dict):
        node["additionalProperties"] = _structural(node["additionalProperties"], definitions)
    if node.get("type") == "array":
        node["items"] = _structural(node["items"], definitions)
        node.setdefault(LIST_TYPE, "atomic")
    if "type" not in node:
        node[PRESERVE] = True
    return _ordered(node)


def _without_defaults(node: JsonSchemaValue) -> JsonSchemaValue:
    properties = {
        name: _without_defaults(value) for name, value in node.get("properties", {}).items()
    }
    rest = {key: value for key, value in node.items() if key != "default"}
    rest |= {"properties": properties} if properties else {}
    return rest | ({"items": _without_defaults(node["items"])} if "items" in node else {})


def _inlined(node: JsonSchemaValue, definitions: dict[str, JsonSchemaValue]) -> JsonSchemaValue:
    """The node with its reference replaced by the target; its other keys win."""
    if "$ref" not in node:
        return dict(node)
    beside = {key: value for key, value in node.items() if key != "$ref"}
    return _inlined(definitions[node["$ref"]], definitions) | beside


def _boolean_exclusive(node: JsonSchemaValue, *, limit: str, exclusive: str) -> None:
    """Say `x > 3` as CRDs do: `{minimum: 3, exclusiveMinimum: true}`."""
    if exclusive in node:
        node[limit] = node[exclusive]
        node[exclusive] = True


def _ordered(node: dict[str, Any]) -> dict[str, Any]:
    known = {key: node[key] for key in KEY_ORDER if key in node}
    return known | {key: node[key] for key in sorted(node) if key not in known}
