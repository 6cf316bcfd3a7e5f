"""Strategic merge of pod templates, as by `kubectl patch`.

Lists of a PodSpec merge by their published keys (k8s.io/api core/v1, `patchMergeKey`). Directives
are not supported: acceptance refuses them.
"""

from collections.abc import Mapping
from typing import Any

from etude.common.api.run.pod_template import MERGE_KEYS
from etude.operator.manifests import Manifest

ONE_OF = ("volumes",)
"""Lists of union types: an item of the patch replaces the item as a whole."""


def strategic_merge(below: Manifest, above: Mapping[str, Any]) -> Manifest:
    """The merge of two mappings; the patch wins, and null deletes."""
    merged = dict(below)
    for name, value in above.items():
        if value is None:
            merged.pop(name, None)
        elif name in MERGE_KEYS and isinstance(merged.get(name), list) and isinstance(value, list):
            merged[name] = _merge_by_key(merged[name], value, name)
        elif isinstance(merged.get(name), dict) and isinstance(value, dict):
            merged[name] = strategic_merge(merged[name], value)
        else:
            merged[name] = value
    return merged


def _merge_by_key(below: list[Manifest], above: list[Manifest], name: str) -> list[Manifest]:
    key = MERGE_KEYS[name]
    merged = {item.get(key): item for item in below}
    for item in above:
        item_below = merged.get(item.get(key))
        if item_below is None or name in ONE_OF:
            merged[item.get(key)] = item
        else:
            merged[item.get(key)] = strategic_merge(item_below, item)
    return list(merged.values())
