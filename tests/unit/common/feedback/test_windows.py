"""Windows: created once, read back whole, and a changed rollout is refused."""

import pytest
from blake3 import blake3

from etude.common.blobs import MemoryStore, MissingError
from etude.common.errors import CorruptError
from etude.common.feedback.windows import (
    WindowManifest,
    WindowRollout,
    create_window,
    decode_rollout,
    encode_rollout,
    list_windows,
    read_window,
    rollout_key,
    rollout_prefix,
    window_key,
)
from etude.v1.rollout_pb2 import Link, Rollout

USER = "ab" * 16
ROLLOUT = "cd" * 16


def window(number: int, **changes: object) -> WindowManifest:
    rollout = WindowRollout(
        rollout=ROLLOUT,
        tenant="team",
        user=USER,
        digest="0" * 64,
        stratum="python",
        reward=0.5,
        advantage=0.25,
        consent="v1",
    )
    fields = {
        "number": number,
        "run_uid": "run",
        "epoch": 1,
        "version": 3,
        "opened_ms": 1,
        "closed_ms": 2,
        "last_sequence": 9,
        "signals": {"thumb": 1},
        "rollouts": (rollout,),
    }
    return WindowManifest.model_validate(fields | changes)


def test_a_window_is_read_back_as_it_was_created() -> None:
    store = MemoryStore()
    create_window(store, window(2))
    create_window(store, window(1))
    assert list(list_windows(store)) == [1, 2]
    assert list(list_windows(store, after=1)) == [2]
    assert read_window(store, 2) == window(2)
    with pytest.raises(MissingError):
        read_window(store, 3)


def test_a_second_window_of_a_number_changes_nothing() -> None:
    store = MemoryStore()
    create_window(store, window(1))
    assert create_window(store, window(1, closed_ms=3)) == window(1)


def test_a_changed_manifest_is_refused() -> None:
    store = MemoryStore()
    create_window(store, window(1))
    store.put(window_key(1), store.get(window_key(1)).replace(b"0.25", b"9.25"))
    with pytest.raises(CorruptError, match="digest"):
        read_window(store, 1)


def test_a_rollout_is_read_back_only_as_its_window_names_it() -> None:
    rollout = Rollout(rollout_id=ROLLOUT, links=[Link(token_ids=[1, 2], loss_mask=b"\0\1")])
    data = encode_rollout(rollout)
    digest = blake3(data).hexdigest()
    assert decode_rollout(data, digest=digest, where="here") == rollout
    with pytest.raises(CorruptError, match="here"):
        decode_rollout(encode_rollout(Rollout()), digest=digest, where="here")


def test_rollouts_of_a_user_share_a_prefix_that_no_other_user_has() -> None:
    assert rollout_key("team", USER, ROLLOUT).startswith(rollout_prefix("team", USER))
    assert not rollout_key("teams", USER, ROLLOUT).startswith(rollout_prefix("team", USER))
    assert not rollout_key("", USER, ROLLOUT).startswith(rollout_prefix("team", USER))
