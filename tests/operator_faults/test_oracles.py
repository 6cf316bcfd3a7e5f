"""What oracles say of a log and of a state."""

from tests.operator_faults import oracles

from etude.operator.manifests import Ref

TIME = "2026-11-22 23:23:07,757"
RAISED = "Traceback (most recent call last):"


def test_errors_of_ours_and_what_anybody_raises_are_complaints() -> None:
    error = f"{TIME} ERROR etude.operator.controller.operator RLRun demo: retries in 1.0 s"
    lines = [f"{TIME} WARNING etude.operator.controller.operator x", error, RAISED, "ValueError: x"]
    assert oracles.complaints("\n".join(lines)) == [error, RAISED]
    lines = [f"{TIME} ERROR asyncio Task exception was never retrieved", RAISED, "OSError"]
    assert oracles.complaints("\n".join(lines)) == [RAISED]


def test_what_kopf_says_of_an_api_server_that_fails_is_none() -> None:
    lines = [f"{TIME} ERROR kopf._core.reactor.running Watcher has failed: 'x'", RAISED, RAISED]
    assert oracles.complaints("\n".join(lines)) == []
    lines.append(f"{TIME} ERROR etude.operator.main ended")
    assert oracles.complaints("\n".join(lines)) == lines[-1:]


def test_a_callback_of_kopf_that_fails_is_none_and_one_of_ours_is_one() -> None:
    raised = "ERROR asyncio Exception in callback stream.<locals>.f(<Task cancell...ggles.py:123>>)"
    theirs = f"{TIME} {raised} at .venv/site-packages/kopf/_cogs/clients/api.py:237"
    assert oracles.complaints("\n".join([theirs, RAISED, "AssertionError"])) == []
    ours = f"{TIME} {raised} at operator/etude/operator/controller/kopf_source.py:37"
    assert oracles.complaints("\n".join([ours, RAISED, "AssertionError"])) == [RAISED]


def test_what_is_measured_must_be_there_and_may_be_any_number() -> None:
    key = Ref("RLRun", "lab", "demo")

    def seen(**role: object) -> oracles.Paths:
        return oracles.state({key: {"status": {"roles": [{"name": "trainer", **role}]}}})

    assert seen(startupSeconds=5) == seen(startupSeconds=9)
    assert seen(startupSeconds=5) != seen()
