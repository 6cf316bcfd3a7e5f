"""A setting of weights that could have no effect is refused; a default never is."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from etude.common.api.lint.linter import lint_text
from etude.common.api.run.weights import Weights, WeightSettings

MANIFESTS = Path(__file__).parents[2] / "cluster" / "bad_manifests.yaml"
GOOD = yaml.safe_load(yaml.safe_load(MANIFESTS.read_text(encoding="utf-8"))["good"]["RLRun"])


def findings(weights: Any, *, gpus: int = 0) -> list[str]:
    roles = GOOD["spec"]["roles"] | {"inference": {"gpusPerReplica": gpus}}
    manifest = GOOD | {"spec": GOOD["spec"] | {"weights": weights, "roles": roles}}
    found = lint_text(json.dumps(manifest), name="run.yaml")
    return [f"{each.what}; {each.fix}" for each in found]


def choices(model: type[Any]) -> Iterator[tuple[str, Any]]:
    """Every value of every field that has a list of them."""
    for info in model.model_fields.values():
        values = (True, False) if info.annotation is bool else get_args(info.annotation)
        yield from ((info.alias, value) for value in values if isinstance(value, str | int))


@pytest.mark.parametrize(("field", "value"), list(choices(Weights)))
def test_a_choice_alone_is_never_refused(field: str, value: object) -> None:
    assert findings({field: value}) == []


@pytest.mark.parametrize(("field", "value"), list(choices(WeightSettings)))
def test_an_advanced_choice_alone_is_never_refused(field: str, value: object) -> None:
    assert findings({"advanced": {field: value}}) == []


@pytest.mark.parametrize("encoding", ["Auto", "Delta", "Full"])
def test_defaults_may_be_spelled_out_beside_any_encoding(encoding: str) -> None:
    assert findings(Weights().to_json() | {"encoding": encoding}) == []


@pytest.mark.parametrize(
    "weights",
    [
        {"pause": "Drain", "advanced": {"prefixCache": "Reset"}},
        {"pause": "InFlight", "advanced": {"recomputeKv": True, "prefixCache": "Reset"}},
        {"advanced": {"prefixCache": "Sticky", "stickyLag": 3}},
        {"advanced": {"commit": "Together", "commitTimeoutSeconds": 31}},
        {"timeoutSeconds": 60, "advanced": {"commit": "Together", "commitTimeoutSeconds": 60}},
        {"timeoutSeconds": 1, "advanced": {"commit": "Together"}},
        {"encoding": "Full", "dtype": "Float32", "advanced": {"retainVersions": 3, "tileGrid": 1}},
        {"dtype": "Float32", "advanced": {"codec": "L2r"}},
        {"advanced": {"skips": []}},
        {"advanced": {"skips": [4096, 2]}},
        {"advanced": {"chainRatio": "1e-9"}},
    ],
    ids=str,
)
def test_a_setting_beside_what_gives_it_effect_is_taken(weights: dict[str, Any]) -> None:
    assert findings(weights) == []


@pytest.mark.parametrize(
    ("weights", "what", "fix"),
    [
        ({"advanced": {"chainRatio": "0"}}, "chainRatio must be above 0", 'for example "0.5"'),
        ({"advanced": {"skips": [6]}}, "skips must be powers of two", "for example [8, 64]"),
        ({"advanced": {"skips": [8, 8]}}, "skips must not repeat a stride", "each stride once"),
        (
            {"advanced": {"recomputeKv": True, "prefixCache": "Sticky"}},
            "recomputeKv drops at each version",
            "set prefixCache: Salted",
        ),
        ({"advanced": {"stickyLag": 5}}, "without prefixCache Sticky", "remove stickyLag"),
        (
            {"advanced": {"commitTimeoutSeconds": 29}},
            "without commit Together",
            "remove commitTimeoutSeconds",
        ),
        (
            {"timeoutSeconds": 9, "advanced": {"commit": "Together", "commitTimeoutSeconds": 10}},
            "must not be above timeoutSeconds",
            "timeoutSeconds or less",
        ),
        (
            {"pause": "Abort", "advanced": {"recomputeKv": True}},
            "recomputeKv has no effect with pause Drain or Abort",
            "set pause: InFlight",
        ),
        ({"encoding": "Full", "advanced": {"codec": "L2"}}, "with encoding Full", "remove codec"),
        ({"encoding": "Full", "advanced": {"skips": [8]}}, "with encoding Full", "remove skips"),
        (
            {"encoding": "Full", "keyframeEverySteps": 99},
            "keyframeEverySteps is 99: keyframeEverySteps has no effect with encoding Full",
            "remove keyframeEverySteps, or set encoding: Auto",
        ),
    ],
    ids=str,
)
def test_a_setting_without_effect_is_refused_with_a_way_out(
    weights: dict[str, Any], what: str, fix: str
) -> None:
    (found,) = findings(weights)
    assert what in found
    assert fix in found


@given(
    codec=st.sampled_from(["L1", "L2", "L2r"]),
    grid=st.sampled_from([1, 2, 4, 8, 16]),
    gpus=st.integers(0, 17),
)
def test_codes_of_whole_tiles_need_engines_that_cut_none(codec: str, grid: int, gpus: int) -> None:
    found = findings({"advanced": {"codec": codec, "tileGrid": grid}}, gpus=gpus)
    cuts_tiles = gpus > 1 and grid % gpus != 0
    assert ["code whole tiles" in each for each in found] == [True] * (codec != "L1" and cuts_tiles)


@given(every=st.integers(1, 1_000_000), steps=st.integers(1, 1_000))
def test_keyframes_are_as_many_steps_apart_as_the_run_says_or_one_version(
    every: int, steps: int
) -> None:
    weights = Weights(keyframe_every_steps=every, advanced=WeightSettings(steps_per_version=steps))
    found = weights.versions_per_keyframe * steps
    assert found == steps if every < steps else every - steps < found <= every
