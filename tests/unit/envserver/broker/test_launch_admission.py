"""Who is sent away, and for how long."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.common.api.pool.spec import LeasePolicy
from etude.common.errors import FullError, InvalidFieldError
from etude.envserver.broker.launch_admission import (
    LEAST_RETRY_S,
    MAX_BATCHES,
    MOST_RETRY_S,
    UNKNOWN_RETRY_S,
    WINDOW_S,
    BrokerLoad,
    GrantRate,
    check_launch,
    excess_of,
    refuse_excess,
)
from etude.v1 import environments_pb2


def load(**fields: int) -> BrokerLoad:
    usual = {"wanted": 1, "waiting": 0, "free": 0, "batches": 0, "held_by_run": 0}
    return BrokerLoad(**(usual | fields))


@given(st.integers(1, 50), st.integers(0, 50), st.integers(0, 50), st.integers(1, 60))
def test_as_many_may_wait_as_the_pool_queues(
    wanted: int, waiting: int, free: int, max_queue: int
) -> None:
    over, _ = excess_of(
        load(wanted=wanted, waiting=waiting, free=free), LeasePolicy(max_queue=max_queue)
    )

    assert over == max(0, waiting + wanted - free - max_queue)


def test_a_run_s_quota_counts_what_it_holds_and_what_it_waits_for() -> None:
    policy = LeasePolicy(max_per_run=10)

    assert excess_of(load(wanted=4, held_by_run=6), policy)[0] == 0
    assert excess_of(load(wanted=5, held_by_run=6), policy)[0] == 1
    assert excess_of(load(wanted=1_000, held_by_run=6_000), LeasePolicy())[0] == 0


def test_a_broker_takes_only_so_many_launches_at_once() -> None:
    assert excess_of(load(batches=MAX_BATCHES - 1), LeasePolicy())[0] == 0
    assert excess_of(load(batches=MAX_BATCHES), LeasePolicy())[0] == 1


def test_the_time_to_come_back_is_what_the_queue_needs_to_drain() -> None:
    drain = GrantRate()
    for tenth in range(100):
        drain.record_grants(2, now_s=tenth / 10)
    assert drain.per_second(now_s=WINDOW_S) == pytest.approx(20.0)

    with pytest.raises(FullError) as caught:
        refuse_excess(load(waiting=160), LeasePolicy(max_queue=1), drain, now_s=WINDOW_S)
    assert caught.value.retry_after_s == pytest.approx(8.0)

    assert drain.retry_after_s(1, now_s=WINDOW_S) == LEAST_RETRY_S
    assert drain.retry_after_s(10**6, now_s=WINDOW_S) == MOST_RETRY_S
    assert drain.retry_after_s(10**6, now_s=3 * WINDOW_S) == UNKNOWN_RETRY_S


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"run_id": ""}, "run_id"),
        ({"run_id": "x" * 254}, "run_id"),
        ({"idempotency_key": ""}, "idempotency_key"),
        ({"count": 0}, "count"),
        ({"count": 9}, "count"),
        ({"group_id": "x" * 254}, "group_id"),
        ({"deadline_unix_ms": -1}, "deadline_unix_ms"),
        ({"snapshot_id": "", "workspace": environments_pb2.WorkspaceSource()}, "workspace.uri"),
    ],
)
def test_a_launch_that_can_never_be_served_names_its_field(
    fields: dict[str, object], named: str
) -> None:
    usual: dict[str, object] = {
        "run_id": "r",
        "idempotency_key": "k",
        "template": "python",
        "count": 1,
        "toolset": "Compact",
        "snapshot_id": "s",
    }
    asked = environments_pb2.LaunchBatchRequest(**(usual | fields))  # type: ignore[arg-type]

    with pytest.raises(InvalidFieldError) as caught:
        check_launch(asked, {"python"}, LeasePolicy(max_per_run=8))

    assert caught.value.field == named
