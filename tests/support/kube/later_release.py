"""Objects as a later release of ours has them: with fields that this one does not know."""

from typing import Any

from etude.common.api.meta import Model

STRANGER = {"ofTheFuture": {"is": ["strange"]}}


def with_strangers(value: Any) -> Any:
    """The value as JSON, with a field of the future in each of its objects."""
    if isinstance(value, Model):
        known = value.to_json()
        fields = type(value).model_fields
        inner = {
            str(field.alias): with_strangers(getattr(value, name)) for name, field in fields.items()
        }
        return {key: inner[key] for key in known} | STRANGER
    if isinstance(value, tuple):
        return [with_strangers(item) for item in value]
    if isinstance(value, dict) and any(isinstance(item, Model) for item in value.values()):
        return {key: with_strangers(item) for key, item in value.items()}
    return value
