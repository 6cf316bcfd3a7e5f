"""A role whose credentials cannot read the run's store says so before it builds an engine."""

from collections.abc import Iterator
from typing import NoReturn

import pytest
from typing_extensions import override

from etude.common import weights
from etude.common.blobs import (
    DeniedError,
    MemoryStore,
    NoBucketError,
    ObjectInfo,
    StoreRefusedError,
)
from etude.common.errors import StoreError
from etude.inference.updates.store_access import require_readable_store


class Guarded(MemoryStore):
    """Answers some calls with an error."""

    def __init__(self, error: StoreError, *calls: str) -> None:
        super().__init__()
        self.error = error
        self.calls: tuple[str, ...] = ()
        weights.claim_epoch(self, holder="t", parent=None, reason="start")
        self.calls = calls

    def _fail(self) -> NoReturn:
        raise self.error

    @override
    def get(self, key: str) -> bytes:
        return self._fail() if "get" in self.calls else super().get(key)

    @override
    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        return self._fail() if "list" in self.calls else super().list(prefix, after)


@pytest.mark.parametrize("has_versions", [True, False])
def test_a_store_that_can_be_read_is_taken_and_nothing_is_written(*, has_versions: bool) -> None:
    store = MemoryStore()
    if has_versions:
        weights.claim_epoch(store, holder="t", parent=None, reason="start")
    before = dict(store.objects)
    require_readable_store(store)
    assert store.objects == before


@pytest.mark.parametrize("call", ["list", "get"])
@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (DeniedError("AccessDenied"), "GetObject and ListBucket"),
        (NoBucketError("the bucket does not exist"), "etude storage init"),
        (StoreRefusedError("status code: 400"), "credentials"),
    ],
)
def test_a_refusal_names_the_call_and_the_way_out(call: str, error: StoreError, fix: str) -> None:
    store = Guarded(error, call)
    with pytest.raises(StoreError, match=f"{store.url}: {call}: {error}; .*{fix}"):
        require_readable_store(store)


@pytest.mark.parametrize("call", ["list", "get"])
def test_a_store_that_is_away_is_waited_for_by_the_replica(
    call: str, caplog: pytest.LogCaptureFixture
) -> None:
    require_readable_store(Guarded(StoreError("no route to host"), call))
    assert f"{call}: no route to host; the replica retries later" in caplog.text
