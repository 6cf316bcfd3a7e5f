"""Thousands of changes of our objects on a real API server, with a real operator behind it.

Each one is refused by name, declined by name, or shows in a child and leaves nothing behind when it
is taken back; the operator survives all of them. The idea is Acto's: https://doi.org/10.1145/3600006.3613161.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.mutations import cases, process, schema
from tests.mutations.api import Api
from tests.mutations.crew import Crew, outcomes
from tests.mutations.lab import Outcome, Verdict
from tests.mutations.process import Running
from tests.support import figures

from etude.common.api import crd

SEED = int(os.environ.get("SEED", "0"))
FEW = 20
"""Of each kind before every landing."""
BENCHES = 6
MOST_SHOWN = int(os.environ.get("ETUDE_MUTATIONS_SHOWN", "150"))
"""Of each kind that go there and back in seconds; what the API server refuses takes no time."""
NO_QUANTITY = {"containers": [{"name": "trainer", "resources": {"requests": {"cpu": "1.5.Gi"}}}]}
FOUND: Mapping[str, tuple[tuple[str, Any], ...]] = {
    "RLRun": (
        ("spec.roles.environments[0].poolTemplate.placement.nodeSelector", {"zone": "a"}),
        ("spec.roles.trainer.podTemplate.spec", {"topologySpreadConstraints": []}),
        ("spec.roles.trainer.podTemplate.spec", {"nonesuch": 1}),
        ("spec.roles.trainer.podTemplate.spec", NO_QUANTITY),
    ),
    "EnvPool": (("spec.network.policy", "Unmanaged"),),
    "Checkpoint": (("spec.storage.secretRef.name", "Cookie"),),
}
"""Changes that once showed a bug, tried whatever the seed says."""


@pytest.fixture(scope="module")
def installed(plane: Mapping[str, Any]) -> None:
    process.install(plane)


@pytest.fixture(scope="module")
def api(plane: Mapping[str, Any], installed: None) -> Api:
    return Api(plane)


@pytest.fixture
def operator(plane: Mapping[str, Any], installed: None, tmp_path: Path) -> Iterator[Running]:
    with process.running(plane, tmp_path) as found:
        yield found


def known(kind: crd.Kind) -> list[cases.Mutation]:
    steps = {place.path: place.steps for place in schema.places(kind)}
    return [
        cases.Mutation(kind, steps[path], "found before", value)
        for path, value in FOUND.get(kind.name, ())
    ]


def judge(operator: Running, found: list[Outcome]) -> None:
    faults = [f"{each.mutation}: {each.verdict}: {each.faults}" for each in found if each.faults]
    assert faults == [], f"seed {SEED}"
    assert operator.troubles == []
    assert operator.answers, f"seed {SEED}"


@pytest.mark.parametrize("kind", crd.KINDS, ids=lambda kind: kind.name)
def test_a_few_changes_show_or_are_refused_by_name_and_can_be_taken_back(
    api: Api, operator: Running, kind: crd.Kind
) -> None:
    made = cases.mutations(kind, SEED)
    few = [*known(kind), *cases.sample(made, FEW, SEED)]
    found = outcomes(Crew(api, kind, 3, print), few, most_shown=FEW)
    assert len(found) == len(few)
    judge(operator, found)


@pytest.mark.long
@pytest.mark.timeout(7_200)
def test_a_thousand_changes_show_or_are_refused_by_name_and_can_be_taken_back(
    api: Api, operator: Running
) -> None:
    found = [
        outcome
        for kind in crd.KINDS
        for outcome in outcomes(
            Crew(api, kind, BENCHES, print),
            cases.sample(cases.mutations(kind, SEED), 10_000, SEED),
            most_shown=MOST_SHOWN,
        )
    ]
    counts = {each: sum(one.verdict is each for one in found) for each in Verdict}
    figures.record(
        "faults",
        mutations=len(found),
        mutations_refused=counts[Verdict.REFUSED],
        mutations_accepted=len(found) - counts[Verdict.REFUSED],
        mutations_declined=counts[Verdict.DECLINED],
        mutations_seed=SEED,
        crashed=len(operator.troubles) + (not operator.answers),
        not_shown_or_not_taken_back=sum(bool(each.faults) for each in found),
    )
    assert len(found) >= 1_000
    judge(operator, found)
