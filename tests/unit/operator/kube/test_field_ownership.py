"""Who owns the fields of an object, once what a create wrote is handed to whoever applies."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from etude.operator.kube.client import take_over_fields

Tree = dict[str, Any]
NAMES = st.sampled_from(["f:a", "f:b", 'k:{"name":"c"}', "."])
TREES: st.SearchStrategy[Tree] = st.recursive(
    st.just({}), lambda inner: st.dictionaries(NAMES, inner, max_size=3), max_leaves=8
)
ENTRIES = st.fixed_dictionaries(
    {
        "manager": st.sampled_from(["etude/run", "kubectl"]),
        "operation": st.sampled_from(["Apply", "Update"]),
        "fieldsV1": TREES,
    },
    optional={"subresource": st.just("status")},
)


def paths(tree: Tree, at: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    return {at} | {path for key, inner in tree.items() for path in paths(inner, (*at, key))}


def is_ours(entry: Tree, operation: str) -> bool:
    is_main = "subresource" not in entry
    return is_main and (entry["manager"], entry["operation"]) == ("etude/run", operation)


@given(st.lists(ENTRIES, max_size=5))
def test_nobody_loses_a_field_and_one_entry_of_ours_is_left_which_applies(
    managed: list[Tree],
) -> None:
    found = take_over_fields(managed, "etude/run")
    created = [each for each in managed if is_ours(each, "Update")]
    if not created:
        assert found is None
        return
    assert found is not None
    before = [each for each in managed if is_ours(each, "Update") or is_ours(each, "Apply")]
    after = [each for each in found if is_ours(each, "Update") or is_ours(each, "Apply")]
    assert [each["operation"] for each in after] == ["Apply"]
    assert paths(after[0]["fieldsV1"]) == set.union(*(paths(each["fieldsV1"]) for each in before))
    assert [each for each in found if each not in after] == [
        each for each in managed if each not in before
    ]


@given(st.lists(ENTRIES, max_size=5))
def test_what_was_taken_over_is_not_taken_over_again(managed: list[Tree]) -> None:
    found = take_over_fields(managed, "etude/run")
    assert found is None or take_over_fields(found, "etude/run") is None
