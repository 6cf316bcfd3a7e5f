"""When an order to a run can do nothing, and what does instead."""

from typing import Any

from etude.cli.kubectl.verbs.orders import held


def run(reason: str | None, *, suspend: bool = False) -> dict[str, Any]:
    hold = {"reason": reason, "message": "why", "since": "2026-01-01T00:00:00Z"}
    status = {} if reason is None else {"hold": hold}
    return {"metadata": {"name": "demo"}, "spec": {"suspend": suspend}, "status": status}


def test_a_run_that_its_spec_suspends_is_its_users_to_resume() -> None:
    assert held(run(None)) is None
    assert held(run(None, suspend=True)) is None
    assert held(run("FailureRule", suspend=True)) is None


def test_a_spent_budget_is_raised_and_a_rule_is_overruled_by_hand() -> None:
    spent, ruled = held(run("BudgetExceeded")), held(run("FailureRule"))
    assert spent is not None
    assert "spec.budget.gpuHours" in spent.fix
    assert ruled is not None
    assert "BudgetExceeded: why" in spent.what
    assert ruled.fix == "kubectl etude suspend demo, and then kubectl etude resume demo"


def test_a_run_that_nobody_has_looked_at_yet_is_not_held() -> None:
    assert held({"metadata": {"name": "demo"}, "spec": {}}) is None
