"""When a broker looks through all that it holds."""

import gc

from etude.envserver.broker.server import LATEST_S, QUIET_S, GarbageCollector


def test_old_things_are_left_alone_until_it_is_quiet() -> None:
    is_quiet = False
    pauses = GarbageCollector(lambda: is_quiet, 0.0)
    try:
        assert not pauses.collect(now_s=1.0)
        assert gc.get_freeze_count() > 0
        assert not pauses.collect(now_s=QUIET_S)
        is_quiet = True
        assert pauses.collect(now_s=QUIET_S)
        assert not pauses.collect(now_s=QUIET_S + 1)
    finally:
        gc.unfreeze()


def test_who_is_never_quiet_is_looked_through_all_the_same() -> None:
    pauses = GarbageCollector(lambda: False, 0.0)
    try:
        assert pauses.collect(now_s=LATEST_S)
    finally:
        gc.unfreeze()
