"""Conformance checks of an object store: the guarantees that publishing rests on."""

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import NamedTuple

from etude.common.blobs.store import (
    DeniedError,
    ExistsError,
    MissingError,
    NoBucketError,
    Store,
    StoreRefusedError,
    is_unavailable,
)
from etude.common.errors import EtudeError, StoreError

CONTENT = b"etude"
CREATORS = 8
"""Threads that create one key at the same time."""


class PromiseCheck(NamedTuple):
    """Result of the check of one promise of a store."""

    call: str
    promise: str
    trouble: str = ""
    """Empty where it was kept."""
    fix: str = ""
    is_unavailable: bool = False
    """True if the store gave no answer, and may give one later."""


class _Check(NamedTuple):
    call: str
    promise: str
    trouble: Callable[[Store, str], str]
    fix: str


def probe(store: Store) -> None:
    """Refuse a store without the guarantees that publishing rests on.

    Raises:
        StoreRefusedError: naming the URL, the call that failed and what to change.
        StoreError: the same, for a store that did not answer.
    """
    for verdict in _verdicts(store, _AT_START):
        if verdict.trouble:
            kind = StoreError if verdict.is_unavailable else StoreRefusedError
            raise kind(f"{store.url}: {verdict.call}: {verdict.trouble}; {verdict.fix}")


def check_promises(store: Store) -> Iterator[PromiseCheck]:
    """Every promise in turn, up to the first that is broken: the others rest on it."""
    return _verdicts(store, (*_AT_START, *_IN_DEPTH))


def _verdicts(store: Store, checks: tuple[_Check, ...]) -> Iterator[PromiseCheck]:
    key = f"probe/{uuid.uuid4().hex}"
    try:
        for check in checks:
            verdict = _run_check(check, store, key)
            yield verdict
            if verdict.trouble:
                return
    finally:
        # A failed delete was reported above, or is the reason why nothing could be written.
        with contextlib.suppress(StoreError):
            store.delete([key, _raced(key)])


def _run_check(check: _Check, store: Store, key: str) -> PromiseCheck:
    try:
        trouble = check.trouble(store, key)
    except EtudeError as error:
        fix = suggested_fix(error, store.url) or check.fix
        return PromiseCheck(check.call, check.promise, str(error), fix, is_unavailable(error))
    return PromiseCheck(check.call, check.promise, trouble, check.fix if trouble else "")


def suggested_fix(error: EtudeError, url: str) -> str:
    """Suggested fix for a store's error; empty if the store only answered.

    Args:
        error: the store's.
        url: of the store, or anything that begins with it.
    """
    is_folder = url.startswith("file://")
    match error:
        case NoBucketError():
            return "make the bucket with `etude storage init`, or correct the URL"
        case DeniedError() if is_folder:
            return (
                "let this user read, write and delete in the folder and below, on a writable disk"
            )
        case DeniedError():
            return "give the credentials PutObject, GetObject, DeleteObject and ListBucket here"
        case StoreError() if is_folder:
            return "look at the folder and at its disk: df and dmesg say more"
        case StoreError():
            return "check endpoint, region and network, and ask again"
        case _:
            return ""


def _create(store: Store, key: str) -> str:
    store.create(key, CONTENT)
    return ""


def _create_again(store: Store, key: str) -> str:
    try:
        store.create(key, b"other")
    except ExistsError:
        return ""
    return "overwrote an object"


def _get(store: Store, key: str) -> str:
    found = store.get(key)
    return "" if found == CONTENT else f"answered {found[:20]!r} where {CONTENT!r} was created"


def _get_range(store: Store, key: str) -> str:
    found = store.get_range(key, 1, 3)
    return "" if found == CONTENT[1:4] else f"answered {found[:20]!r} for bytes 1 to 3"


def _list(store: Store, key: str) -> str:
    found = [info.size for info in store.list("probe/") if info.key == key]
    return "" if found == [len(CONTENT)] else "does not show what was just written"


def _delete(store: Store, key: str) -> str:
    store.delete([key])
    if store.head(key) is not None or key in {info.key for info in store.list("probe/")}:
        return "still shows an object after its deletion"
    try:
        store.get(key)
    except MissingError:
        return ""
    return "still reads an object after its deletion"


def _put_twice(store: Store, key: str) -> str:
    store.put(key, b"older")
    store.put(key, b"newer")
    return "" if store.get(key) == b"newer" else "still reads what was overwritten"


def _race(store: Store, key: str) -> str:
    won: list[int] = []
    failed: list[EtudeError] = []

    def create(number: int) -> None:
        try:
            store.create(_raced(key), str(number).encode())
            won.append(number)
        except ExistsError:
            return
        except EtudeError as error:
            failed.append(error)

    threads = [threading.Thread(target=create, args=(n,)) for n in range(CREATORS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    if len(won) != 1:
        return f"{len(won)} of {CREATORS} concurrent creators were told that they won"
    return (
        "" if store.get(_raced(key)) == str(won[0]).encode() else "kept another than the winner's"
    )


def _raced(key: str) -> str:
    return f"{key}-raced"


_CONDITIONAL = "use a store with conditional puts (If-None-Match: *)"
_STRONG = "use a store with strong read-after-write consistency, and no cache before it"
_AT_START = (
    _Check("create", "a new key is written", _create, _CONDITIONAL),
    _Check("create again", "an existing key is refused", _create_again, _CONDITIONAL),
    _Check("get", "what was written is read", _get, _STRONG),
    _Check("get_range", "a range is read", _get_range, "use a store with ranged reads"),
    _Check("list", "what was written is listed", _list, _STRONG),
    _Check("delete", "what was deleted is gone", _delete, _STRONG),
)
_IN_DEPTH = (
    _Check("put", "what was overwritten is read", _put_twice, _STRONG),
    _Check("create at once", f"of {CREATORS} creators one wins", _race, _CONDITIONAL),
)
