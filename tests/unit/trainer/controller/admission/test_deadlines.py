"""The index of deadlines finds the batch that a look at all groups finds."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from etude.trainer.controller.admission.deadlines import DeadlineIndex, GroupDeadline
from etude.trainer.controller.admission.staleness import StalenessBound

Groups = Sequence[tuple[str, GroupDeadline]]


def index_of(
    bound: StalenessBound, *, ready: Sequence[int], unfinished: Sequence[int] = ()
) -> DeadlineIndex:
    """Groups r0, r1, … that are ready and u0, u1, … that are not, by their deadlines."""
    index = DeadlineIndex(bound)
    for rank, deadline in enumerate(ready):
        index.insert(f"r{rank}", GroupDeadline(deadline, rank, is_ready=True))
    for rank, deadline in enumerate(unfinished, start=len(ready)):
        index.insert(f"u{rank - len(ready)}", GroupDeadline(deadline, rank, is_ready=False))
    return index


def pick_plainly(bound: StalenessBound, groups: Groups, trainer: int) -> list[str] | None:
    """The definition: earliest deadlines first, and afterwards every group has its batch yet."""
    ready = sorted((due.deadline, due.rank, name) for name, due in groups if due.is_ready)
    batch = [name for _, _, name in ready[: bound.groups_per_step]]
    rest = [due.deadline for name, due in groups if name not in batch]
    for deadline in rest:
        due = sum(each <= deadline for each in rest)
        if due > bound.groups_per_step * max(0, deadline - trainer):
            return None
    return batch if len(batch) == bound.groups_per_step else None


def test_the_batch_takes_the_earliest_deadlines_first() -> None:
    bound = StalenessBound(groups_per_step=2, max_staleness=1)
    assert index_of(bound, ready=[3, 1, 2]).pick(trainer=1) == ["r1", "r2"]


def test_too_few_ready_groups_wait() -> None:
    bound = StalenessBound(groups_per_step=2, max_staleness=1)
    assert index_of(bound, ready=[1], unfinished=[1]).pick(trainer=0) is None


def test_a_batch_that_would_make_a_running_group_late_waits() -> None:
    bound = StalenessBound(groups_per_step=1, max_staleness=1)
    # The running group must be in this very batch, or it could never be trained.
    assert index_of(bound, ready=[2], unfinished=[1]).pick(trainer=1) is None
    assert index_of(bound, ready=[2, 1]).pick(trainer=1) == ["r1"]
    assert index_of(bound, ready=[1], unfinished=[1]).pick(trainer=0) == ["r0"]


_CHANGES = st.lists(
    st.tuples(st.integers(0, 11), st.integers(0, 9), st.booleans(), st.booleans()), max_size=40
)


@settings(max_examples=400)
@given(changes=_CHANGES, groups_per_step=st.integers(1, 4), trainer=st.integers(0, 9))
def test_any_changes_lead_to_the_batch_of_the_definition(
    changes: list[tuple[int, int, bool, bool]], groups_per_step: int, trainer: int
) -> None:
    bound = StalenessBound(groups_per_step=groups_per_step, max_staleness=3)
    index, groups = DeadlineIndex(bound), dict[str, GroupDeadline]()
    for rank, deadline, is_ready, is_gone in changes:
        name = f"group-{rank}"
        if is_gone:
            index.discard(name)
            groups.pop(name, None)
        else:
            due = GroupDeadline(deadline, rank, is_ready)
            index.insert(name, due)
            groups[name] = due
        assert index.pick(trainer=trainer) == pick_plainly(bound, list(groups.items()), trainer)
        late = [n for n, due in groups.items() if bound.is_late(due.deadline, trainer=trainer)]
        assert sorted(index.late(trainer=trainer)) == sorted(late)


def test_the_last_admitted_unfinished_groups_are_in_the_way() -> None:
    bound = StalenessBound(groups_per_step=1, max_staleness=1)
    index = index_of(bound, ready=[2], unfinished=[1, 1, 2])
    # At 0 one of deadline 1 can be in the next batch, and one of deadline 2 in the one after it.
    assert index.blocking(trainer=0) == ["u1"]
    assert index_of(bound, ready=[], unfinished=[1, 1, 2]).blocking(trainer=0) == []
    assert index_of(bound, ready=[2], unfinished=[2]).blocking(trainer=0) == []


@settings(max_examples=300)
@given(
    ready=st.lists(st.integers(2, 6), max_size=8),
    unfinished=st.lists(st.integers(0, 6), max_size=8),
    groups_per_step=st.integers(1, 3),
)
def test_without_the_groups_in_the_way_a_batch_is_there_and_with_one_of_them_it_is_not(
    ready: list[int], unfinished: list[int], groups_per_step: int
) -> None:
    bound = StalenessBound(groups_per_step=groups_per_step, max_staleness=3)
    index = index_of(bound, ready=ready, unfinished=unfinished)
    blocking = index.blocking(trainer=2)
    if blocking:
        assert index.pick(trainer=2) is None
    for name in blocking:
        assert index.pick(trainer=2) is None
        index.discard(name)
    if blocking:
        assert index.pick(trainer=2) is not None
