"""Epochs of a log: each writer has its own, and fences the ones before."""

import threading

import pytest

from etude.common.blobs import MemoryStore
from etude.common.durable_log import claim_log_epoch, is_log_fenced
from etude.common.errors import CorruptError


def test_each_claim_fences_the_writers_before() -> None:
    store = MemoryStore()
    first = claim_log_epoch(store, "log/", holder="a")
    assert not is_log_fenced(store, "log/", first)
    second = claim_log_epoch(store, "log/", holder="b")
    assert (first, second) == (1, 2)
    assert is_log_fenced(store, "log/", first)
    assert not is_log_fenced(store, "log/", second)


def test_logs_of_one_store_have_epochs_of_their_own() -> None:
    store = MemoryStore()
    claim_log_epoch(store, "a/", holder="x")
    assert claim_log_epoch(store, "b/", holder="x") == 1


def test_writers_that_start_at_once_get_different_epochs() -> None:
    store = MemoryStore()
    claimed: list[int] = []

    def claim() -> None:
        claimed.append(claim_log_epoch(store, "log/", holder="a"))

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claimed) == list(range(1, 9))


def test_a_foreign_object_among_the_epochs_is_refused() -> None:
    store = MemoryStore()
    store.create("log/epochs/copy of 1", b"")
    with pytest.raises(CorruptError, match="copy of 1"):
        claim_log_epoch(store, "log/", holder="a")
