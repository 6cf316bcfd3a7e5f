"""Channels: the newest record counts, and of two writers of a number one wins."""

import pytest
from tests.support.release.channel_records import ChannelWriter

from etude.common.blobs import MemoryStore
from etude.common.errors import CorruptError, InvalidFieldError
from etude.common.release.channels import (
    CANARY,
    STABLE,
    ChannelRecord,
    ServedVersion,
    append_record,
    channel_key,
    newest_record,
    retained_versions,
)


def record(number: int, version: int = 7) -> ChannelRecord:
    return ChannelRecord(
        channel=STABLE,
        number=number,
        served=ServedVersion(run_uid="run", epoch=1, number=version),
        action="Promote",
        sentence="promoted",
        decided_ms=1,
    )


def test_the_newest_record_is_read_back() -> None:
    store = MemoryStore()
    for number in (1, 2, 10):
        append_record(store, record(number, version=number))
    found = newest_record(store, STABLE)
    assert found is not None
    assert found.number == 10
    assert found.served is not None
    assert found.served.version == (1, 10)


def test_nothing_is_newer_than_the_known_record() -> None:
    store = MemoryStore()
    append_record(store, record(1))
    assert newest_record(store, STABLE, known=1) is None
    assert newest_record(store, "canary") is None


def test_of_two_writers_of_a_number_the_first_wins() -> None:
    store = MemoryStore()
    first = append_record(store, record(1, version=7))
    assert append_record(store, record(1, version=8)) == first


def test_a_record_under_another_number_is_refused() -> None:
    store = MemoryStore()
    append_record(store, record(1))
    store.put(channel_key(STABLE, 2), store.get(channel_key(STABLE, 1)))
    with pytest.raises(CorruptError, match="holds record 1"):
        newest_record(store, STABLE)


def test_the_served_version_and_the_other_one_before_stay_readable() -> None:
    store = MemoryStore()
    stable, canary = ChannelWriter(store, STABLE), ChannelWriter(store, CANARY)
    for number in (3, 5, 5):
        stable.serve(number)
    for version in (4, 7, 7, None, None):
        canary.serve(version)
    ChannelWriter(store, "other", run_uid="uid-other").serve(9)
    assert {version.number for version in retained_versions(store, "uid-run")} == {3, 5, 4, 7}
    store.put(channel_key(STABLE, 4), b"{}")
    store.put("channels/NO/000000000001.json", b"{}")
    assert {version.number for version in retained_versions(store, "uid-run")} == {3, 5, 4, 7}
    stable.number = 4
    stable.serve(8)
    assert {version.number for version in retained_versions(store, "uid-run")} == {5, 8, 4, 7}


@pytest.mark.parametrize("name", ["", "a/b", "..", "Stable", "x" * 64])
def test_a_channel_with_another_kind_of_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidFieldError, match="channel"):
        newest_record(MemoryStore(), name)
