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
    found = dict(below)
    for name, value in above.items():
        if value is None:
            found.pop(name, None)
        elif name in MERGE_KEYS and isinstance(found.get(name), list) and isinstance(value, list):
            found[name] = _merge_by_key(found[name], value, name)
        elif isinstance(found.get(name), dict) and isinstance(value, dict):
            found[name] = strategic_merge(found[name], value)
        else:
            found[name] = value
    return found


def _merge_by_key(below: list[Manifest], above: list[Manifest], name: str) -> list[Manifest]:
    key = MERGE_KEYS[name]
    found = {item.get(key): item for item in below}
    for item in above:
        before = found.get(item.get(key))
        if before is None or name in ONE_OF:
            found[item.get(key)] = item
        else:
            found[item.get(key)] = strategic_merge(before, item)
    return list(found.values())
