"""The pool that a run owns, as it is sent to the API server."""

from collections.abc import Iterator
from typing import Any

from etude.common.api.kinds import RLRun
from etude.operator.builders import run as desired


def mappings(value: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every mapping of an object, but for those in lists, which are sent whole."""
    if isinstance(value, dict):
        yield path, value
        for key, each in value.items():
            yield from mappings(each, f"{path}.{key}")


def test_nothing_empty_is_sent_because_it_would_stay_behind_as_null(run: RLRun) -> None:
    (pool,) = desired.own_pools(run, is_running=True)
    assert [path for path, each in mappings(pool["spec"]) if each == {}] == []
    assert pool["spec"]["templates"]
