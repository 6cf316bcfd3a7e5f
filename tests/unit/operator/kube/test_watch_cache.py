"""The cache: never older than what was written, never wrong about what is gone."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from etude.operator.kube.cache import WatchCache, reduce_object
from etude.operator.manifests import (
    Manifest,
    Ref,
    digest,
    has_fields_of,
    merge_patch,
    parse_quantity,
    stamp_digest,
)

KEY = Ref("Pod", "lab", "p")


def pod(version: int, uid: str = "u1", **metadata: Any) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "p",
            "namespace": "lab",
            "uid": uid,
            "resourceVersion": str(version),
            **metadata,
        },
    }


def test_an_older_version_is_dropped() -> None:
    cache = WatchCache()
    assert cache.update(pod(5))
    assert not cache.update(pod(4))
    assert cache.get(KEY) == pod(5)


def test_of_a_pods_spec_a_large_cluster_keeps_its_node_name_alone() -> None:
    cache = WatchCache(reduce_object)
    spec = {"nodeName": "n", "hostname": "p", "containers": [{"name": "c", "image": "i"}]}
    cache.update({**pod(5, managedFields=[{"manager": "x"}]), "spec": spec})
    assert cache.get(KEY) == {**pod(5), "spec": {"nodeName": "n"}}
    service = {**pod(6, uid="u2"), "kind": "Service", "spec": {"ports": [{"port": 1}]}}
    cache.update(service)
    assert cache.list_objects("Service") == [service]


def test_a_uid_leads_to_its_object_alone_and_to_nothing_once_that_is_gone() -> None:
    cache = WatchCache()
    cache.update(pod(5))
    cache.update(pod(9, uid="u2"))
    assert (cache.get_by_uid("u1"), cache.get_by_uid("u2")) == (None, pod(9, uid="u2"))
    cache.update(pod(10, uid="u2"))
    assert cache.get_by_uid("u2") == pod(10, uid="u2")
    cache.remove(KEY, "u2")
    assert cache.get_by_uid("u2") is None


def test_a_late_event_does_not_bring_an_object_back() -> None:
    cache = WatchCache()
    cache.update(pod(5))
    cache.remove(KEY, "u1")
    assert not cache.update(pod(6))
    assert cache.get(KEY) is None
    assert cache.update(pod(7, uid="u2"))


def test_an_object_that_left_what_is_watched_is_known_again_when_it_comes_back() -> None:
    cache = WatchCache()
    cache.update(pod(5))
    cache.remove(KEY, "u1", at=6)
    assert cache.get(KEY) is None
    assert not cache.update(pod(6)), "as it was when it left"
    assert cache.update(pod(7))
    assert cache.get(KEY) == pod(7)
    assert not cache.is_deleted("u1", at=7)


def test_that_an_object_left_is_old_news_once_it_is_known_to_be_back() -> None:
    cache = WatchCache()
    cache.update(pod(7))
    cache.remove(KEY, "u1", at=6)
    assert cache.get(KEY) == pod(7)


def test_losing_an_old_object_leaves_the_new_one_of_the_same_name() -> None:
    cache = WatchCache()
    cache.update(pod(5))
    cache.update(pod(9, uid="u2"))
    cache.remove(KEY, "u1")
    assert cache.get(KEY) == pod(9, uid="u2")


def test_objects_are_found_by_their_controller() -> None:
    cache = WatchCache()
    owner = [{"uid": "o1", "controller": True}]
    cache.update(pod(5, ownerReferences=owner))
    assert [m["metadata"]["name"] for m in cache.list_owned("o1")] == ["p"]
    cache.remove(KEY, "u1")
    assert cache.list_owned("o1") == []


def test_a_list_removes_what_it_does_not_hold_unless_that_is_newer() -> None:
    cache = WatchCache()
    cache.update(pod(5))
    cache.update({**pod(20), "metadata": {**pod(20, uid="u2")["metadata"], "name": "q"}})
    cache.relist("Pod", [], version=10)
    assert cache.get(KEY) is None
    assert cache.get(Ref("Pod", "lab", "q")) is not None


def test_a_list_of_one_namespace_says_nothing_about_others() -> None:
    cache = WatchCache()
    cache.update(pod(5))
    cache.relist("Pod", [], version=10, namespace="other")
    assert cache.get(KEY) is not None


def test_listeners_hear_of_every_change_and_of_the_last_state() -> None:
    cache = WatchCache()
    heard: list[str] = []
    cache.subscribe(lambda manifest: heard.append(manifest["metadata"]["resourceVersion"]))
    cache.update(pod(5))
    cache.update(pod(5))
    cache.update(pod(6))
    cache.remove(KEY, "u1")
    assert heard == ["5", "6", "6"]


def test_defaults_that_the_server_adds_are_no_difference() -> None:
    desired = {"spec": {"containers": [{"name": "a", "env": [{"name": "X", "value": "1"}]}]}}
    live = {
        "spec": {
            "dnsPolicy": "ClusterFirst",
            "containers": [
                {"name": "sidecar"},
                {"name": "a", "imagePullPolicy": "Always", "env": [{"name": "X", "value": "1"}]},
            ],
        }
    }
    assert has_fields_of(live, desired)
    live["spec"]["containers"][1]["env"] = [{"name": "X", "value": "2"}]  # type: ignore[index]
    assert not has_fields_of(live, desired)


def test_quantities_are_compared_by_value() -> None:
    assert parse_quantity("1") == parse_quantity("1000m")
    assert parse_quantity("1Gi") == parse_quantity("1024Mi")
    assert parse_quantity("nonsense") == "nonsense"
    limits = {"resources": {"limits": {"cpu": "1000m"}}}
    assert has_fields_of({"x": {"resources": {"limits": {"cpu": "1"}}}}, {"x": limits})


def test_a_field_that_is_not_sent_any_more_changes_the_stamp() -> None:
    before = {"metadata": {"name": "a"}, "spec": {"x": 1, "y": 2}}
    after = {"metadata": {"name": "a"}, "spec": {"x": 1}}
    assert digest(before) != digest(after)
    assert (
        stamp_digest(before)["metadata"]["annotations"]
        != stamp_digest(after)["metadata"]["annotations"]
    )


json_values = st.recursive(
    st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(st.sampled_from("abcd"), json_values, max_size=4)


@given(objects, objects)
def test_amerge_patch_turns_one_status_into_the_other(before: Any, after: Any) -> None:
    def merged(value: Any, patch: Any) -> Any:
        if not isinstance(patch, dict):
            return patch
        result = dict(value) if isinstance(value, dict) else {}
        for key, item in patch.items():
            if item is None:
                result.pop(key, None)
            else:
                result[key] = merged(result.get(key), item)
        return result

    assert merged(before, merge_patch(before, after)) == after
    assert merge_patch(after, after) == {}


def test_what_is_empty_is_covered_by_nothing_but_for_a_kind_of_volume() -> None:
    # The API server drops empty lists and mappings: without this every pass would apply them.
    desired: Manifest = {"tolerations": [], "nodeSelector": {}, "affinity": None, "name": "a"}
    assert has_fields_of({"name": "a"}, desired)
    assert not has_fields_of({"name": "a", "tolerations": [{"key": "b"}]}, desired)
    assert not has_fields_of({"name": "a"}, {"name": "a", "emptyDir": {}})


def test_a_key_that_somebody_adds_to_what_chooses_pods_is_a_difference() -> None:
    chosen = {"etude.dev/run": "demo"}
    more = {**chosen, "a": "b"}
    for wanted, live in (
        ({"selector": chosen}, {"selector": more}),
        ({"podSelector": {"matchLabels": chosen}}, {"podSelector": {"matchLabels": more}}),
        ({"nodeSelector": chosen}, {"nodeSelector": more}),
    ):
        assert has_fields_of({"spec": wanted}, {"spec": wanted})
        assert not has_fields_of({"spec": live}, {"spec": wanted})
    assert has_fields_of({"labels": more}, {"labels": chosen}), (
        "a label beside ours is somebody else's"
    )
