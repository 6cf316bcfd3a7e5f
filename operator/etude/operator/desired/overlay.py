"""A part of a pod template laid over another, as kubectl lays a patch over an object.

Strategic merge of PodSpec by its published merge keys (k8s.io/api core/v1, `patchMergeKey`),
without directives: acceptance refuses those.
"""

from collections.abc import Mapping
from typing import Any

from etude.common.api.podtemplate import MERGE_KEYS
from etude.operator.manifests import Manifest

ONE_OF = ("volumes",)
"""Lists whose items hold one of several kinds: another kind replaces the item."""


def merged(below: Manifest, above: Mapping[str, Any]) -> Manifest:
    """Both mappings as one; where they differ, the upper one wins, and null takes away."""
    found = dict(below)
    for name, value in above.items():
        if value is None:
            found.pop(name, None)
        elif name in MERGE_KEYS and isinstance(found.get(name), list) and isinstance(value, list):
            found[name] = _by_key(found[name], value, name)
        elif isinstance(found.get(name), dict) and isinstance(value, dict):
            found[name] = merged(found[name], value)
        else:
            found[name] = value
    return found


def _by_key(below: list[Manifest], above: list[Manifest], name: str) -> list[Manifest]:
    key = MERGE_KEYS[name]
    found = {item.get(key): item for item in below}
    for item in above:
        before = found.get(item.get(key))
        if before is None or name in ONE_OF:
            found[item.get(key)] = item
        else:
            found[item.get(key)] = merged(before, item)
    return list(found.values())
