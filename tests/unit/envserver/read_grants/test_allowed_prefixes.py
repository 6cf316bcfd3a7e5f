"""Prefixes of a store that hosts without credentials may read."""

import pytest

from etude.common.api.pool.spec import EnvPoolSpec
from etude.common.errors import UserError
from etude.envserver.read_grants import allowed_prefixes
from etude.envserver.read_grants.allowed_prefixes import (
    WORKSPACE_S,
    OrderedWorkspaces,
    is_below,
    plain_prefix,
    spec_prefixes,
)

IMAGE = "0" * 32


def test_a_spec_names_images_sources_and_models_of_buckets_alone() -> None:
    spec = EnvPoolSpec.model_validate(
        {
            "templates": [
                {"name": "a", "image": f"s3://one/images/{IMAGE}"},
                {"name": "b", "image": "python"},
                {"name": "c"},
            ],
            "images": {"sources": ["s3://two/layouts/", "registry.example.com/acme"]},
            "search": {"backend": f"trained-{IMAGE[:16]}", "models": "s3://three/models"},
        }
    )
    found = [f"s3://one/images/{IMAGE}", "s3://two/layouts", "s3://three/models"]
    assert list(spec_prefixes(spec)) == found


@pytest.mark.parametrize(
    ("prefix", "allowed", "is_it"),
    [
        ("s3://b/images", "s3://b/images", True),
        ("s3://b/images/one", "s3://b/images", True),
        ("s3://b/images-of-others", "s3://b/images", False),
        ("s3://b", "s3://b/images", False),
        ("s3://b/anything", "s3://b", True),
        ("s3://bucket", "s3://b", False),
    ],
)
def test_a_prefix_lies_below_whole_segments(prefix: str, allowed: str, *, is_it: bool) -> None:
    assert is_below(prefix, allowed) is is_it


def test_each_prefix_has_one_spelling() -> None:
    assert plain_prefix("s3://bucket/a/b/") == plain_prefix("s3://bucket/a/b?x#y")
    assert plain_prefix("s3://bucket") == plain_prefix("s3://bucket/") == "s3://bucket"
    assert plain_prefix("file:///etc") == plain_prefix("empty:") == ""
    for uri in ("s3://bucket/a/../b", "s3://bucket/a//b", "s3://bucket/./a"):
        with pytest.raises(UserError):
            plain_prefix(uri)


def test_a_workspace_is_remembered_for_an_hour_after_its_last_order() -> None:
    ordered = OrderedWorkspaces()
    ordered.record("s3://b/tasks/one", now_s=0.0)
    ordered.record("file:///tasks/two", now_s=0.0)
    ordered.record("s3://b/tasks/one", now_s=100.0)
    assert ordered.has("s3://b/tasks/one", now_s=WORKSPACE_S + 99)
    assert not ordered.has("s3://b/tasks/one", now_s=WORKSPACE_S + 100)
    for uri in ("file:///tasks/two", "s3://b/tasks", "s3://b/tasks/one/more"):
        assert not ordered.has(uri, now_s=100.0)


def test_the_oldest_workspaces_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allowed_prefixes, "MAX_WORKSPACES", 2)
    ordered = OrderedWorkspaces()
    for number in (1, 2, 1, 3):
        ordered.record(f"s3://b/{number}", now_s=0.0)
    assert [ordered.has(f"s3://b/{number}", now_s=0.0) for number in (1, 2, 3)] == [
        True,
        False,
        True,
    ]
