"""A process whose memory was damaged stays distrusted, whatever happens to its record."""

import pytest
from pydantic import ValidationError

from etude.common.blobs import MemoryStore
from etude.common.weights import VersionId, list_suspects, mark_suspect

NAME = "run-inference-0.1a2b3c4d"


def test_a_suspect_is_found_with_the_version_of_its_last_good_audit() -> None:
    store = MemoryStore()
    assert list_suspects(store) == []
    mark_suspect(store, NAME, since=VersionId(2, 7), message="state ab, not cd")
    (found,) = list_suspects(store)
    assert (found.replica, found.since, found.message) == (
        NAME,
        VersionId(2, 7),
        "state ab, not cd",
    )


def test_the_first_record_of_a_process_stays() -> None:
    store = MemoryStore()
    mark_suspect(store, NAME, since=VersionId(2, 7), message="first")
    mark_suspect(store, NAME, since=VersionId(2, 9), message="second")
    assert [each.since for each in list_suspects(store)] == [VersionId(2, 7)]


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff" * 100])
def test_a_damaged_record_distrusts_all_that_its_process_ever_said(data: bytes) -> None:
    store = MemoryStore()
    mark_suspect(store, NAME, since=VersionId(2, 7), message="")
    (key,) = store.objects
    store.objects[key] = data
    (found,) = list_suspects(store)
    assert (found.replica, found.since) == (NAME, VersionId(0, 0))


def test_a_record_of_another_process_does_not_vouch_for_this_one() -> None:
    store = MemoryStore()
    mark_suspect(store, "other", since=VersionId(2, 7), message="")
    ((key, data),) = store.objects.items()
    store.objects[key.replace("other", NAME)] = data
    assert {each.replica: each.since for each in list_suspects(store)} == {
        "other": VersionId(2, 7),
        NAME: VersionId(0, 0),
    }


@pytest.mark.parametrize("name", ["", "../epochs/000001", "a/b", "é"])
def test_a_name_that_is_no_key_is_refused(name: str) -> None:
    with pytest.raises(ValidationError):
        mark_suspect(MemoryStore(), name, since=VersionId(1, 1), message="")
