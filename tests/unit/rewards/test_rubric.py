"""The rubric: parameters checked by name, rewards as the sum of weighted parts."""

from collections.abc import Callable

import pytest

from etude.common.api.run import rewards as parameters
from etude.common.api.run.roles import RewardFunction
from etude.common.errors import UserError
from etude.rewards.faults import Fault
from etude.rewards.functions.registry import FUNCTIONS
from etude.rewards.rubric import RewardValue, Rubric
from etude.v1 import rollout_pb2

Make = Callable[..., rollout_pb2.Rollout]

LENGTH = {
    "q": 0,
    "power": 2,
    "weights": {"promptTokens": 1, "completionTokens": 1, "toolOutputTokens": 1},
    "free": 260,
    "scale": 220,
    "cap": 1,
    "onlyOnSuccess": True,
}


def _function(name: str, function: str, **rest: object) -> RewardFunction:
    return RewardFunction.model_validate({"name": name, "function": function, **rest})


@pytest.fixture
def demo() -> Rubric:
    return Rubric.from_functions(
        [
            _function("tests", "Verifier", parameters={"onlyWhenFinished": True}),
            _function("length", "LengthPenalty", weight="0.05", parameters=LENGTH),
            _function("broken", "BrokenCalls", weight="0.2"),
            _function("unfinished", "Unfinished", weight="0.1"),
        ]
    )


@pytest.mark.parametrize(
    ("success", "length", "malformed", "ending", "expected"),
    [
        (1.0, 150, 0, rollout_pb2.ENDING_STOPPED, 1.0),
        (1.0, 370, 0, rollout_pb2.ENDING_STOPPED, 1 - 0.05 * 0.25),
        (1.0, 480, 2, rollout_pb2.ENDING_STOPPED, 1 - 0.05 - 0.2),
        (0.0, 480, 1, rollout_pb2.ENDING_LENGTH_LIMIT, -0.2 - 0.1),
        (0.0, 90, 0, rollout_pb2.ENDING_STOPPED, 0.0),
    ],
)
def test_the_demo_rubric_gives_its_recipe(
    demo: Rubric,
    success: float,
    length: int,
    malformed: int,
    ending: rollout_pb2.Ending,
    expected: float,
) -> None:
    rollout = rollout_pb2.Rollout(
        ending=ending,
        costs=rollout_pb2.Costs(
            prompt_tokens=45, completion_tokens=length - 45, malformed_calls=malformed
        ),
    )
    scored = demo.score(rollout, success)
    assert isinstance(scored, RewardValue)
    assert scored.reward == pytest.approx(expected, abs=1e-15)
    assert scored.success == success
    assert scored.reward == pytest.approx(sum(p.weight * p.value for p in scored.parts))


def test_a_reward_beyond_all_bounds_is_a_fault() -> None:
    rubric = Rubric.from_functions(
        [
            _function("tests", "Verifier"),
            _function("length", "LengthPenalty", parameters={"q": -4, "k": 1000, "scale": 1}),
        ]
    )
    long = rollout_pb2.Rollout(costs=rollout_pb2.Costs(completion_tokens=10**9))
    assert isinstance(rubric.score(long, 1.0), Fault)


@pytest.mark.parametrize(
    ("function", "given", "named"),
    [
        ("Verifier", {"retires": 2}, "parameters.retires: Verifier has no such parameter"),
        ("LengthPenalty", {"weights": {"turn": 1}}, "parameters.weights.turn"),
        ("LengthPenalty", {"scale": 0}, "parameters.scale"),
        ("LengthPenalty", {"q": float("nan")}, "parameters.q"),
        ("BrokenCalls", {"limit": 3}, "parameters.limit"),
        ("Unfinished", {"x": None}, "parameters.x"),
        ("Vibes", {}, "'Vibes' is not one of Verifier"),
    ],
)
def test_a_wrong_parameter_is_refused_by_name(
    function: str, given: dict[str, object], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        parameters.check_function(function, given)  # type: ignore[arg-type] # nan is not JSON


def test_a_wrong_parameter_of_a_run_is_found_with_its_place() -> None:
    functions = [_function("tests", "Verifier"), _function("b", "BrokenCalls", parameters={"x": 1})]
    with pytest.raises(UserError, match=r"spec\.roles\.rewards\.functions\[1\].*parameters\.x"):
        Rubric.from_functions(functions)


@pytest.mark.parametrize("names", [[], ["a", "b"]])
def test_a_rubric_needs_exactly_one_verifier(names: list[str]) -> None:
    functions = [_function(name, "Verifier") for name in names]
    with pytest.raises(UserError, match="exactly one entry"):
        Rubric.from_functions([*functions, _function("z", "Unfinished")])


def test_the_digest_names_everything_that_decides_a_reward() -> None:
    def digest(**rest: object) -> str:
        return Rubric.from_functions([_function("tests", "Verifier", **rest)]).digest()

    assert digest() == digest()
    assert len({digest(), digest(weight="2"), digest(parameters={"onlyWhenFinished": True})}) == 3


def test_every_function_of_the_manifest_is_in_the_registry_with_its_parameters() -> None:
    assert {name: each.parameters for name, each in FUNCTIONS.items()} == parameters.PARAMETERS
    assert all(each.version for each in FUNCTIONS.values())
