"""What a tombstone may name."""

import pytest

from etude.common.blobs import MemoryStore
from etude.common.weights import VersionId
from etude.common.weights.protocol.tombstones import Tombstone, read_trash, write_tombstone


@pytest.mark.parametrize(
    "key",
    [
        "weights/epochs/000001.json",
        "weights/schema/../../x",
        "owner",
        "weights/leases/a.json",
        "weights/trash/0.json",
    ],
)
def test_a_tombstone_names_nothing_but_versions(key: str) -> None:
    with pytest.raises(ValueError, match="nothing that may be deleted"):
        Tombstone(id="0" * 32, epoch=1, keys=(key,))


def test_a_tombstone_under_another_name_counts_as_damaged(store: MemoryStore) -> None:
    write_tombstone(store, Tombstone(id="0" * 32, epoch=1, keys=(VersionId(1, 0).manifest_key,)))
    store.put(f"weights/trash/{'1' * 32}.json", store.get(f"weights/trash/{'0' * 32}.json"))
    trash = read_trash(store)
    assert trash.keys == {VersionId(1, 0).manifest_key}
    assert trash.damaged == [f"weights/trash/{'1' * 32}.json"]
