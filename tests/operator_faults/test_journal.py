"""Plans that reached their end are not tried again, until the code is another."""

from collections import Counter
from pathlib import Path

from tests.operator_faults.crash_plans import Outcome, Plan
from tests.operator_faults.journal import Journal
from tests.operator_faults.oracles import Reference

REFERENCE = Reference(
    state={"Pod/a.spec.x": 1, "Pod/a.status.y": None},
    varying=frozenset({"Pod/a.status.z"}),
    digest=Counter({"make Pod/a": 2}),
    writes=7,
)


def _written(folder: Path) -> Journal:
    journal = Journal.of(folder, "delete", "one")
    journal.begin(REFERENCE)
    journal.add(Outcome(Plan(1, is_before=True), "apply pods/a"))
    journal.add(Outcome(Plan(2, is_before=False), "apply pods/a", ["it is different"]))
    journal.add(Outcome(Plan(3, is_before=False), "apply pods/a"))
    return journal


def test_plans_that_reached_the_reference_are_known_and_others_are_tried_again(
    tmp_path: Path,
) -> None:
    _written(tmp_path)
    found = Journal.of(tmp_path, "delete", "one")
    assert found.reference == REFERENCE
    assert found.reached == {Plan(1, is_before=True), Plan(3, is_before=False)}
    assert Journal.of(tmp_path, "create-finish", "one").reference is None


def test_other_code_begins_anew(tmp_path: Path) -> None:
    _written(tmp_path)
    found = Journal.of(tmp_path, "delete", "two")
    assert found.reference is None
    assert found.reached == set()


def test_a_line_that_was_cut_short_is_passed_over(tmp_path: Path) -> None:
    path = _written(tmp_path).path
    path.write_text(path.read_text(encoding="utf-8")[:-2], encoding="utf-8")
    found = Journal.of(tmp_path, "delete", "one")
    assert found.reached == {Plan(1, is_before=True)}
    found.add(Outcome(Plan(4, is_before=True)))
    again = Journal.of(tmp_path, "delete", "one")
    assert again.reached == {Plan(1, is_before=True), Plan(4, is_before=True)}
