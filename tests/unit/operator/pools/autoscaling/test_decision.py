"""Invariants of every autoscaler decision."""

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from etude.common.api.pool.autoscaling import (
    PredictiveScaling,
    Refill,
    ScaleToZero,
    ScalingMode,
    ScheduleEntry,
    ZeroMode,
)
from etude.common.plans.forecast import Quantile, Wave
from etude.operator.pools.autoscaling import limits
from etude.operator.pools.autoscaling.config import PoolScalingConfig, ScalingParameters
from etude.operator.pools.autoscaling.decide import decide_pool
from etude.operator.pools.autoscaling.provisioning import ProvisionTime
from etude.operator.pools.autoscaling.reactive import PanicState
from etude.operator.pools.autoscaling.values import (
    CreationBucket,
    DemandPlan,
    HeldLeases,
    IdleReplica,
    PoolDecision,
    PoolMetrics,
    PoolState,
    ScalingCause,
    initial_state,
)
from etude.operator.pools.autoscaling.windows import Sample, add_peak

NOW_S = 10_000.0
LEASE = (Quantile(0.5, 60.0), Quantile(0.9, 120.0), Quantile(0.99, 300.0))
counts = st.integers(0, 60)


@st.composite
def metrics(draw: st.DrawFn, slots: int) -> PoolMetrics:
    holding, idle, leased = draw(counts), draw(counts), 0
    if holding:
        leased = draw(st.integers(holding, holding * slots))
    aged = draw(st.integers(0, leased))
    creating = draw(counts)
    return PoolMetrics(
        seen_s=NOW_S,
        wall_s=1.79e9,
        ready=holding + idle,
        creating=creating,
        unschedulable=draw(st.integers(0, creating)),
        terminating=draw(counts),
        holding=holding,
        leased=leased,
        queued=draw(counts),
        idle=tuple(
            IdleReplica(f"r{n}", NOW_S - n, draw(st.booleans()), draw(st.booleans()))
            for n in range(idle)
        ),
        held=(HeldLeases("python", aged, draw(st.floats(0, 500))),) if aged else (),
        lease=draw(st.sampled_from([(), LEASE])),
        provision=ProvisionTime(draw(st.floats(1, 60)), 60.0, draw(st.floats(0, 0.5))),
    )


waves = st.builds(
    Wave,
    template=st.sampled_from(["python", "rust"]),
    count=st.integers(1, 64),
    start_s=st.floats(-300, 900).map(lambda s: NOW_S + s),
    sigma_s=st.floats(0, 100),
    lease=st.sampled_from([(), LEASE]),
)
plans = st.lists(
    st.builds(
        DemandPlan,
        run_id=st.sampled_from(["a", "b"]),
        version=st.integers(1, 9),
        heard_s=st.floats(0, 300).map(lambda s: NOW_S - s),
        until_s=st.floats(-100, 600).map(lambda s: NOW_S + s),
        waves=st.lists(waves, max_size=4).map(tuple),
        ratio=st.floats(0.2, 4.0),
        gpus=st.integers(0, 8),
    ),
    max_size=2,
)


@st.composite
def configs(draw: st.DrawFn) -> PoolScalingConfig:
    slots, most = draw(st.sampled_from([1, 4])), draw(st.integers(1, 120))
    zero = draw(st.sampled_from(ZeroMode))
    idle = 0 if zero is ZeroMode.WHEN_IDLE else draw(st.integers(0, min(20, most)))
    schedule = (ScheduleEntry(cron="* * * * *", min_idle=draw(st.integers(0, 80))),)
    return PoolScalingConfig(
        max_replicas=most,
        slots_per_replica=slots,
        min_idle=idle,
        overcommit_factor=draw(st.floats(1, 2)),
        autoscaling=ScalingParameters(
            mode=draw(st.sampled_from([ScalingMode.REACTIVE, ScalingMode.PREDICTIVE])),
            scale_down_delay_s=draw(st.sampled_from([0.0, 30.0, 120.0])),
            scale_to_zero=ScaleToZero(mode=zero),
            schedule=schedule if draw(st.booleans()) else (),
            refill=Refill(
                max_per_second=draw(st.integers(1, 50)), max_in_flight=draw(st.integers(1, 100))
            ),
        ),
    )


@st.composite
def states(draw: st.DrawFn) -> PoolState:
    samples = tuple(Sample(NOW_S - 60 + 2 * n, draw(counts)) for n in range(1, 30))
    peaks: tuple[Sample, ...] = ()
    lasting: tuple[Sample, ...] = ()
    for back_s in (170, 110, 50, 2):
        wanted, spares = draw(counts), draw(st.integers(0, 20))
        peaks = add_peak(peaks, Sample(NOW_S - back_s, wanted + spares), keep_s=1_000)
        lasting = add_peak(lasting, Sample(NOW_S - back_s, wanted), keep_s=1_000)
    return PoolState(
        desired=draw(counts),
        samples=samples,
        peaks=peaks,
        lasting=lasting,
        panic=draw(st.sampled_from([None, PanicState(NOW_S - 10, 30)])),
        busy_s=NOW_S - draw(st.floats(0, 300)),
        bucket=CreationBucket(draw(st.floats(0, 10)), NOW_S - 2),
    )


@st.composite
def questions(
    draw: st.DrawFn,
) -> tuple[PoolState, PoolMetrics, list[DemandPlan], PoolScalingConfig]:
    config = draw(configs())
    return draw(states()), draw(metrics(config.slots_per_replica)), draw(plans), config


Question = tuple[PoolState, PoolMetrics, list[DemandPlan], PoolScalingConfig]


@given(questions())
def test_replicas_that_hold_a_lease_are_always_wanted_and_no_more_than_the_caps(
    question: Question,
) -> None:
    _, seen, _, config = question
    found = decide_pool(*question, NOW_S)

    assert found.desired >= seen.holding
    assert found.desired <= max(seen.holding, min(config.max_replicas, found.hard_cap))


@given(questions(), st.integers(1, 40), st.sampled_from(["queued", "leased"]))
def test_more_demand_never_means_fewer_replicas(question: Question, more: int, where: str) -> None:
    state, seen, told, config = question
    busier = replace(seen, queued=seen.queued + more)
    if where == "leased":
        assume(seen.holding and seen.leased + more <= seen.holding * config.slots_per_replica)
        busier = replace(seen, leased=seen.leased + more)

    assert (
        decide_pool(state, seen, told, config, NOW_S).desired
        <= decide_pool(state, busier, told, config, NOW_S).desired
    )


@given(questions())
def test_nothing_shrinks_in_panic(question: Question) -> None:
    state, seen, told, config = question
    found = decide_pool(state, seen, told, config, NOW_S)
    assume(found.state.panic is not None)

    assert found.desired >= min(state.desired, config.max_replicas)


@given(questions())
def test_the_same_question_has_the_same_answer(question: Question) -> None:
    assert decide_pool(*question, NOW_S) == decide_pool(*question, NOW_S)


@given(questions())
def test_no_more_is_created_than_is_missing_and_than_the_budget_admits(question: Question) -> None:
    state, seen, _, config = question
    found = decide_pool(*question, NOW_S)
    refill = config.autoscaling.refill
    bucket = limits.refill_tokens(state.bucket, refill, now_s=NOW_S)

    assert 0 <= found.creates <= max(0, found.desired - seen.ready - seen.creating)
    assert found.creates <= bucket.tokens
    assert not found.creates or found.creates + seen.creating <= refill.max_in_flight
    assert found.state.bucket.tokens == pytest.approx(bucket.tokens - found.creates)


@given(questions())
def test_only_idle_replicas_are_victims_and_what_stays_is_enough(question: Question) -> None:
    _, seen, _, _ = question
    found = decide_pool(*question, NOW_S)

    assert set(found.victims) <= {replica.name for replica in seen.idle}
    assert len(set(found.victims)) == len(found.victims) <= seen.ready - seen.holding
    assert not found.victims or seen.ready - len(found.victims) >= found.desired
    assert not (found.victims and found.creates)


@given(questions())
def test_what_is_being_created_goes_before_what_is_ready_and_only_if_too_many_are_there(
    question: Question,
) -> None:
    _, seen, _, _ = question
    found = decide_pool(*question, NOW_S)

    assert 0 <= found.withdrawn <= (seen.creating if found.is_hard_capped else seen.unschedulable)
    gone = found.withdrawn + len(found.victims)
    assert not gone or seen.ready + seen.creating - gone >= found.desired
    assert not (found.withdrawn and found.creates)
    if found.is_hard_capped:
        assert found.withdrawn == min(
            seen.creating, max(0, seen.ready + seen.creating - found.desired)
        )


@given(questions())
def test_replicas_beyond_the_hard_cap_are_an_alarm_and_let_none_be_created(
    question: Question,
) -> None:
    _, seen, _, _ = question
    found = decide_pool(*question, NOW_S)
    total = seen.ready + seen.creating + seen.terminating

    assert found.is_hard_capped == (total > max(found.hard_cap, seen.holding))
    assert not (found.is_hard_capped and found.creates)


@given(st.integers(0, 80), st.integers(0, 80), configs())
def test_a_restart_never_scales_down_on_empty_windows(
    ready: int, queued: int, config: PoolScalingConfig
) -> None:
    assume(ready <= config.max_replicas)
    seen = PoolMetrics(
        seen_s=NOW_S, wall_s=1.79e9, ready=ready, queued=queued, provision=ProvisionTime(20.0, 40.0)
    )
    state = initial_state(ready, now_s=NOW_S)
    for tick in range(30):
        now_s = NOW_S + 2 * tick
        found = decide_pool(state, replace(seen, seen_s=now_s), (), config, now_s)
        state = found.state

        assert found.desired >= ready
        assert not found.victims


@given(questions())
def test_plans_that_are_stale_unheard_or_far_from_what_came_ask_for_nothing(
    question: Question,
) -> None:
    state, seen, told, config = question
    silent = [replace(plan, heard_s=NOW_S - 151) for plan in told]
    over = [replace(plan, until_s=NOW_S - 31) for plan in told]
    wrong = [replace(plan, ratio=2.5) for plan in told]
    expected = decide_pool(state, seen, (), config, NOW_S)

    for others in (silent, over):
        found = decide_pool(state, seen, others, config, NOW_S)
        assert replace(found, unreliable=()) == expected
    found = decide_pool(state, seen, wrong, config, NOW_S)
    assert found.unreliable == tuple(sorted(plan.run_id for plan in told))
    assert replace(found, unreliable=()) == expected


@given(questions())
def test_a_reactive_pool_does_not_look_at_plans(question: Question) -> None:
    state, seen, told, config = question
    reactive = replace(config, autoscaling=replace(config.autoscaling, mode=ScalingMode.REACTIVE))
    reliable = [replace(plan, ratio=1.0) for plan in told]

    assert decide_pool(state, seen, reliable, reactive, NOW_S) == decide_pool(
        state, seen, (), reactive, NOW_S
    )


@given(questions(), st.floats(15.1, 1_000))
def test_without_a_report_nothing_is_decided(question: Question, silent_s: float) -> None:
    state, seen, told, config = question
    found = decide_pool(state, replace(seen, seen_s=NOW_S - silent_s), told, config, NOW_S)
    bucket = limits.refill_tokens(state.bucket, config.autoscaling.refill, now_s=NOW_S)
    after = replace(state, bucket=limits.take_tokens(bucket, found.creates))

    assert found == PoolDecision(
        state=after, desired=state.desired, creates=found.creates, cause=ScalingCause.UNKNOWN
    )


@given(questions(), st.integers(0, 60))
def test_without_a_report_what_is_lost_is_replaced_within_the_budget(
    question: Question, staffed: int
) -> None:
    state, seen, told, config = question
    refill = config.autoscaling.refill
    silent = replace(seen, seen_s=NOW_S - 60)
    found = decide_pool(replace(state, staffed=staffed), silent, told, config, NOW_S)
    bucket = limits.refill_tokens(state.bucket, refill, now_s=NOW_S)

    lost = min(staffed, config.max_replicas) - seen.ready - seen.creating
    room = min(bucket.tokens, refill.max_in_flight - seen.creating)
    assert found.creates == max(0, math.floor(min(lost, room)))


@pytest.mark.parametrize("mode", [ScalingMode.MANUAL, ScalingMode.EXTERNAL])
def test_where_somebody_else_decides_a_decision_is_refused(mode: ScalingMode) -> None:
    config = PoolScalingConfig(max_replicas=10, autoscaling=ScalingParameters(mode=mode))
    seen = PoolMetrics(seen_s=NOW_S, wall_s=0.0, ready=1, provision=ProvisionTime(20.0, 40.0))

    with pytest.raises(ValueError, match=f"mode {mode}"):
        decide_pool(initial_state(1, now_s=NOW_S), seen, (), config, NOW_S)


def planned(count: int, start_s: float, sigma_s: float = 0.0) -> DemandPlan:
    wave = Wave(template="python", count=count, start_s=NOW_S + start_s, sigma_s=sigma_s)
    return DemandPlan(run_id="r", version=1, heard_s=NOW_S, until_s=NOW_S + 900, waves=(wave,))


@pytest.mark.parametrize(
    ("start_s", "sigma_s", "peak"),
    [
        # X(p95) 40 s, 64 at 200 / 20 = 10 per second: 6.3 s with one replica there, a tick of 2 s.
        (48.2, 0.0, 64),
        (48.4, 0.0, 0),
        # 1.645 deviations of 10 s earlier.
        (64.6, 10.0, 64),
        (64.9, 10.0, 0),
    ],
)
def test_a_wave_is_created_for_from_its_latest_start_on(
    start_s: float, sigma_s: float, peak: int
) -> None:
    seen = PoolMetrics(seen_s=NOW_S, wall_s=0.0, ready=1, provision=ProvisionTime(20.0, 40.0))
    predictive = PredictiveScaling(service_level_percent=95)
    config = PoolScalingConfig(
        max_replicas=100, autoscaling=ScalingParameters(predictive=predictive)
    )
    told = planned(64, start_s, sigma_s)

    found = decide_pool(initial_state(1, now_s=NOW_S), seen, [told], config, NOW_S)

    assert found.plan_peak == peak
    # 63 are missing, of which 95 of 100 are ready in time: (63 + 1.645 x sqrt(63 x 0.05)) / 0.95.
    assert found.desired == (1 + math.ceil(69.4) if peak else 1)


def test_what_a_wave_needs_soon_is_not_given_up_before() -> None:
    idle = tuple(IdleReplica(f"r{n}", NOW_S - 900) for n in range(20))
    seen = PoolMetrics(
        seen_s=NOW_S, wall_s=0.0, ready=20, idle=idle, provision=ProvisionTime(20.0, 40.0)
    )
    wanted = (Sample(NOW_S - 121, 20),)
    state = PoolState(
        desired=20, peaks=wanted, lasting=wanted, busy_s=0.0, bucket=CreationBucket(0.0, NOW_S)
    )
    config = PoolScalingConfig(max_replicas=100)

    # 120 s of delay, 40 s to provision, 1.6 s for sixteen, a tick.
    near = decide_pool(state, seen, [planned(16, 163.0)], config, NOW_S)
    far = decide_pool(state, seen, [planned(16, 164.0)], config, NOW_S)

    assert (near.desired, len(near.victims)) == (16, 4)
    assert (far.desired, len(far.victims)) == (10, 10)
