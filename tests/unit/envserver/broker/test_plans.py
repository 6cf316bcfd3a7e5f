"""Which plans count, and what they make nodes do."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.common.errors import InvalidFieldError
from etude.common.plans.forecast import Wave
from etude.common.plans.registry import MAX_WAVES, PlanRegistry
from etude.envserver.broker.hosts import CLONE_BYTES, HostState
from etude.envserver.broker.start_costs import TemplateReadiness
from etude.envserver.broker.warm_targets import (
    HALVE_AFTER_S,
    WarmTargets,
    Watermark,
    apportion,
    ready_by,
)
from etude.trainer.controller.admission.forecast import WaveForecast
from etude.v1 import environments_pb2, plan_pb2

NOW_MS = 1_000_000_000


def plan(
    version: int, *waves: tuple[int, float], valid_s: float = 60.0, now_s: float = 0.0
) -> plan_pb2.RolloutPlan:
    """Of waves that start so many seconds after now."""
    now_ms = NOW_MS + round(1000 * now_s)
    return plan_pb2.RolloutPlan(
        version=version,
        made_unix_ms=now_ms,
        valid_until_unix_ms=now_ms + round(1000 * valid_s),
        waves=[plan_pb2.Wave(template="python", count=c, start_s=s) for c, s in waves],
    )


def report(
    plans: PlanRegistry, told: plan_pb2.RolloutPlan, now_s: float = 0.0, run: str = "r"
) -> None:
    plans.report(run, told, now_s=now_s)


def counts(plans: PlanRegistry, now_s: float = 0.0) -> list[int]:
    return [wave.count for wave in plans.waves(now_s=now_s).get("python", [])]


def test_a_newer_plan_replaces_an_older_one_and_never_the_other_way() -> None:
    plans = PlanRegistry({"python"})
    report(plans, plan(2, (4, 1.0)))
    report(plans, plan(1, (9, 1.0)))
    assert counts(plans) == [4]

    report(plans, plan(3, (5, 1.0), (6, 2.0)))
    assert counts(plans) == [5, 6]


def test_a_plan_that_is_too_old_says_nothing() -> None:
    plans = PlanRegistry({"python"})
    report(plans, plan(1, (4, 1.0), valid_s=10.0))

    assert counts(plans, now_s=9.9) == [4]
    assert counts(plans, now_s=10.0) == []
    with pytest.raises(InvalidFieldError) as caught:
        report(plans, plan(7, (4, 1.0), valid_s=-1.0))
    assert caught.value.field == "plan.valid_until_unix_ms"


def test_what_came_is_taken_from_the_earliest_waves() -> None:
    plans = PlanRegistry({"python"})
    report(plans, plan(1, (4, 5.0), (4, 1.0), (4, 9.0)))

    plans.record_arrival("r", "python", 6)
    plans.record_arrival("another", "python", 6)
    plans.record_arrival("r", "other", 6)

    assert counts(plans) == [2, 4]


@pytest.mark.parametrize(("observed", "left"), [(0, []), (6, [4]), (9, [1]), (10, []), (90, [])])
def test_plans_that_are_wrong_by_more_than_twice_are_not_acted_on(
    observed: int, left: list[int]
) -> None:
    plans = PlanRegistry({"python"})
    for version in range(12):
        now_s = 10.0 * version
        report(plans, plan(version + 1, (10, 1.0), now_s=now_s), now_s=now_s)
        plans.record_arrival("r", "python", observed)

    assert plans.is_trusted("r") == (6 <= observed <= 10)
    assert counts(plans, now_s=115.0) == left


def test_a_run_s_plan_is_trusted_again_once_it_is_right() -> None:
    plans = PlanRegistry({"python"})
    for version in range(30):
        now_s = 10.0 * version
        report(plans, plan(version + 1, (10, 1.0), now_s=now_s), now_s=now_s)
        plans.record_arrival("r", "python", 90 if version < 5 else 10)

    assert plans.is_trusted("r")


@pytest.mark.parametrize(
    ("wave", "field"),
    [
        ({"template": "java"}, "template"),
        ({"count": 1 << 30}, "count"),
        ({"start_s": float("nan")}, "start_s"),
        ({"start_s": float("inf")}, "start_s"),
        ({"start_sigma_s": -1.0}, "start_sigma_s"),
        ({"start_sigma_s": float("nan")}, "start_sigma_s"),
        ({"lease_seconds": [plan_pb2.LeaseQuantile(share=0.0, seconds=1)]}, "lease_seconds"),
        ({"lease_seconds": [plan_pb2.LeaseQuantile(share=0.5, seconds=-1)]}, "lease_seconds"),
        (
            {
                "lease_seconds": [
                    plan_pb2.LeaseQuantile(share=0.9, seconds=1),
                    plan_pb2.LeaseQuantile(share=0.5, seconds=2),
                ]
            },
            "lease_seconds",
        ),
    ],
)
def test_a_plan_that_makes_no_sense_names_its_field(wave: dict[str, object], field: str) -> None:
    told = plan(1)
    told.waves.append(plan_pb2.Wave(template="python", count=1))
    told.waves[0].MergeFrom(plan_pb2.Wave(**wave))  # type: ignore[arg-type]

    with pytest.raises(InvalidFieldError) as caught:
        report(PlanRegistry({"python"}), told)

    assert caught.value.field == f"plan.waves[0].{field}"


def test_a_plan_has_so_many_waves_and_no_more() -> None:
    with pytest.raises(InvalidFieldError, match="more than"):
        report(PlanRegistry({"python"}), plan(1, *[(1, 1.0)] * (MAX_WAVES + 1)))


def test_waves_for_another_pool_are_not_ours() -> None:
    told = plan(1, (4, 1.0), (5, 1.0))
    told.waves[0].pool, told.waves[0].template = "other", "java"
    told.waves[1].pool = "ours"
    plans = PlanRegistry({"python"}, "ours")
    report(plans, told)

    assert counts(plans) == [5]


@pytest.mark.parametrize("off_s", [-3600.0, -70.0, -30.0, 0.0, 50.0, 3600.0])
def test_p15_a_plan_starts_when_it_says_whatever_clock_its_run_has(off_s: float) -> None:
    plans = PlanRegistry({"python"})
    report(plans, plan(1, (4, 45.0), now_s=off_s))

    ((wave,),) = plans.waves(now_s=0.0).values()
    assert wave == Wave(template="python", count=4, start_s=45.0)
    assert plans.current(now_s=0.0)["r"].until_s == 60.0


def test_p15_a_run_whose_clock_is_set_back_is_heard_with_its_next_plan() -> None:
    plans = PlanRegistry({"python"})
    report(plans, plan(20_000, (4, 45.0), valid_s=600.0))
    report(plans, plan(5_000, (64, 45.0), valid_s=600.0, now_s=5.0), now_s=5.0)

    assert counts(plans, now_s=5.0) == [64]


def test_a_plan_that_is_told_twice_does_not_start_anew() -> None:
    plans = PlanRegistry({"python"})
    report(plans, plan(1, (4, 45.0), valid_s=600.0))
    report(plans, plan(1, (4, 45.0), valid_s=600.0), now_s=30.0)

    ((wave,),) = plans.waves(now_s=30.0).values()
    assert wave.start_s == 45.0


def test_shortages_double_what_is_kept_and_idling_halves_it() -> None:
    mark, sizes = Watermark(), []
    for second in range(8):
        mark.record_shortage(64, now_s=float(second))
        mark.record_shortage(64, now_s=second + 0.5)
        sizes.append(mark.size)
    assert sizes == [2, 4, 8, 16, 32, 64, 64, 64]

    for minute in range(1, 8):
        mark.decay(now_s=7.5 + minute * HALVE_AFTER_S)
        sizes.append(mark.size)
    assert sizes[8:] == [32, 16, 8, 4, 2, 0, 0]


@given(st.integers(0, 500), st.dictionaries(st.text("abc", min_size=1), st.integers(0, 60)))
def test_parts_add_up_and_follow_the_rooms(total: int, room: dict[str, int]) -> None:
    parts = apportion(total, room)

    assert sum(parts.values()) == min(total, sum(room.values()))
    for name, part in parts.items():
        assert 0 <= part <= room[name]
        if sum(room.values()):
            exact = min(total, sum(room.values())) * room[name] / sum(room.values())
            assert abs(part - exact) < 1


def nodes(*memory_bytes: int | None) -> list[HostState]:
    return [
        HostState(
            node_id=f"n{n}",
            slots=8,
            memory_bytes=each,
            readiness_by_template={"python": TemplateReadiness()},
        )
        for n, each in enumerate(memory_bytes)
    ]


def clones(
    found: dict[str, list[environments_pb2.WarmTarget]],
) -> dict[str, tuple[int, int]]:
    return {n: (each.paused_clones, each.shells) for n, [each] in found.items()}


def test_a_wave_is_made_ready_before_it_starts_and_not_long_before() -> None:
    warming = WarmTargets(PlanRegistry({"python"}))
    report(warming.plans, plan(1, (6, 30.0)))

    assert warming.targets(nodes(None, None), now_s=0.0) == {}
    assert clones(warming.targets(nodes(None, None), now_s=28.5)) == {"n0": (3, 0), "n1": (3, 0)}


def test_memory_bounds_what_is_kept_ready() -> None:
    warming = WarmTargets(PlanRegistry({"python"}))
    report(warming.plans, plan(1, (16, 0.0)))

    found = clones(warming.targets(nodes(CLONE_BYTES, 9 * CLONE_BYTES), now_s=0.0))

    assert found == {"n0": (1, 0), "n1": (8, 0)}


def test_without_a_plan_shortages_alone_make_shells() -> None:
    warming = WarmTargets(PlanRegistry({"python"}))
    warming.record_start("python", environments_pb2.START_SPAWN, 2, now_s=0.0)

    assert clones(warming.targets(nodes(None, None), now_s=0.0)) == {"n0": (0, 1), "n1": (0, 1)}


def test_copies_of_folders_need_nothing_ready() -> None:
    warming = WarmTargets(PlanRegistry({"python"}))
    warming.record_start("python", environments_pb2.START_COPY, 2, now_s=0.0)

    assert warming.targets(nodes(None), now_s=0.0) == {}


def test_no_target_is_set_where_nothing_may_start() -> None:
    warming = WarmTargets(PlanRegistry({"python"}))
    report(warming.plans, plan(1, (6, 0.0)))
    draining, broken, sound = nodes(None, None, None)
    draining.draining = True
    broken.readiness_by_template["python"].quarantined = "it crashed"

    assert clones(warming.targets([draining, broken, sound], now_s=0.0)) == {"n2": (6, 0)}


def test_a_template_is_ready_at_once_where_it_is_at_hand() -> None:
    near, far = nodes(None, None)
    far.readiness_by_template["python"].resident = False
    far.queue_ms = 9_000.0

    def at(*where: HostState) -> int:
        (told,) = ready_by(where, ["python"], now_unix_ms=NOW_MS)
        return told.ready_by_unix_ms

    assert at(near, far) == 0
    assert at(far) == NOW_MS + 9_000 + 2_400
    assert at() > NOW_MS + 10_000


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.floats(0, 60)), max_size=5), st.floats(0, 60))
def test_targets_never_exceed_what_plans_expect_or_hosts_hold(
    waves: list[tuple[int, float]], now_s: float
) -> None:
    warming = WarmTargets(PlanRegistry({"python"}))
    report(warming.plans, plan(1, *waves, valid_s=1_000.0))
    pool = nodes(None, 5 * CLONE_BYTES, 0)

    found = warming.targets(pool, now_s=now_s)

    wanted = sum(target.paused_clones for each in found.values() for target in each)
    assert wanted <= min(sum(count for count, _ in waves), 8 + 5)


def test_two_waves_out_of_time_are_no_reason_to_distrust_a_plan_and_three_are() -> None:
    plans = PlanRegistry({"python"})
    trust = []
    # What comes at once of a run's first plan is the wave with which it was told.
    report(plans, plan(0, (64, 100.0), valid_s=600.0))
    plans.record_arrival("r", "python", 64)
    for version in range(1, 6):
        # Each wave comes 90 s before its time.
        now_s = 10.0 * version
        report(plans, plan(version, (64, 100.0), valid_s=600.0, now_s=now_s), now_s)
        trust.append(plans.is_trusted("r"))
        plans.record_arrival("r", "python", 64)

    assert trust == [True, True, True, False, False]


def test_a_plan_that_is_repeated_while_nothing_is_due_proves_nothing() -> None:
    plans = PlanRegistry({"python"})
    report(plans, plan(1, (64, 5.0), valid_s=600.0))
    report(plans, plan(2, (64, 500.0), valid_s=600.0, now_s=100.0), 100.0)
    missed = plans.ratio("r")
    for version in range(3, 60):
        now_s = 100.0 + version
        report(plans, plan(version, (64, 500.0), valid_s=600.0, now_s=now_s), now_s)

    assert plans.ratio("r") == missed < 1


GAP_S, TRAINING_S = 120.0, 40.0


class Rhythm:
    """A run with a wave each two minutes that tells its plan as the trainer does, each 5 s, too."""

    def __init__(self, *, is_told_first: bool) -> None:
        self.plans, self.now_s, self._forecast = PlanRegistry({"python"}), 0.0, WaveForecast()
        self._is_told_first = is_told_first

    def waves(self, *late_s: float) -> list[float]:
        """Waves that come so late; returns the ratios of the time before each of them."""
        ratios = []
        for each_s in late_s:
            self._forecast_step(self.now_s + GAP_S - TRAINING_S)
            self._until(self.now_s + TRAINING_S + each_s)
            ratios.append(self.plans.ratio("r"))
            self._wave()
        return ratios

    def _forecast_step(self, at_s: float) -> None:
        self._until(at_s)
        self._forecast.record_step(at_s)
        self._tell()

    def _wave(self) -> None:
        self._forecast.record_wave(self.now_s)
        for tell in (self._tell, self._come)[:: 1 if self._is_told_first else -1]:
            tell()

    def _come(self) -> None:
        self.plans.record_arrival("r", "python", 64)

    def _until(self, at_s: float) -> None:
        while self.now_s + 5.0 < at_s:
            self.now_s += 5.0
            self._tell()
        self.now_s = at_s

    def _tell(self) -> None:
        now_ms = round(1000 * (1_000 + self.now_s))
        told = self._forecast.plan([{"env": 64}] * 3, now_s=self.now_s, now_unix_ms=now_ms)
        if told.waves:
            for wave in told.waves:
                wave.pool, wave.template = "", "python"
            report(self.plans, told, self.now_s)


@pytest.mark.parametrize("is_told_first", [True, False])
def test_a_wave_counts_as_late_once_however_often_its_run_says_that_it_is_due(
    *, is_told_first: bool
) -> None:
    run = Rhythm(is_told_first=is_told_first)
    run.waves(*[0.0] * 8)

    (late,) = run.waves(180.0)
    assert 0.7 < late < 0.8
    assert run.waves(0.0, 0.0)[-1] > late


@pytest.mark.parametrize("is_told_first", [True, False])
def test_waves_that_come_in_time_are_trusted_whether_their_plan_or_their_launch_is_heard_first(
    *, is_told_first: bool
) -> None:
    assert set(Rhythm(is_told_first=is_told_first).waves(*[0.0] * 12)) == {1.0}


def test_one_wave_of_five_that_an_evaluation_delays_leaves_a_plan_trusted() -> None:
    run = Rhythm(is_told_first=True)
    run.waves(*[0.0] * 4)

    assert min(run.waves(*[180.0, 0.0, 0.0, 0.0, 0.0] * 6)) > 0.6
