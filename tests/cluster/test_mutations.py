"""Changes of our objects by the thousand on a real API server, with a real operator behind it.

Each one is refused by name, declined by name, or shows in a child and leaves nothing behind when it
is taken back; the operator survives all of them. The idea is Acto's: https://doi.org/10.1145/3600006.3613161.

ETUDE_MUTATIONS says how many changes are tried, 60 unless set and `all` for every one; SEED which.
Where it is set, figures go to bench/out/faults.json. `pytest -s` says how far it is.
"""

import os
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import pytest
from tests.harness.mutations import cases, process, schema
from tests.harness.mutations.api import Api
from tests.harness.mutations.crew import Crew, outcomes
from tests.harness.mutations.lab import Outcome, Verdict
from tests.harness.mutations.process import Running
from tests.support import figures

from etude.common.api.schema import crd

BENCHED = [kind for kind in crd.KINDS if kind not in {crd.POLICY_ROUTE, crd.EVAL_RUN}]
"""A route and an evaluation are nothing without a run, which no bench has."""
SEED = int(os.environ.get("SEED", "0"))
ASKED = os.environ.get("ETUDE_MUTATIONS", "")
FEW = 60
"""Before every landing."""
BENCHES = 6
NO_QUANTITY = {"containers": [{"name": "trainer", "resources": {"requests": {"cpu": "1.5.Gi"}}}]}
FOUND: Mapping[str, tuple[tuple[str, Any], ...]] = {
    "RLRun": (
        ("spec.roles.environments[0].poolTemplate.placement.nodeSelector", {"zone": "a"}),
        ("spec.roles.trainer.podTemplate.spec", {"topologySpreadConstraints": []}),
        ("spec.roles.trainer.podTemplate.spec", {"nonesuch": 1}),
        ("spec.roles.trainer.podTemplate.spec", {"serviceAccountName": "default"}),
        ("spec.roles.trainer.podTemplate.spec", {"serviceAccount": "default"}),
        ("spec.roles.trainer.podTemplate.spec", NO_QUANTITY),
        ("spec.observability.otlpEndpoint", "http://h:99999"),
        ("spec.observability.otlpEndpoint", None),
        ("spec.scheduling.topology.required", "zone"),
    ),
    "EnvPool": (("spec.network.policy", "Unmanaged"), ("spec.maxReplicas", 9)),
    "Checkpoint": (
        ("spec.storage.secretRef.name", "Cookie"),
        ("spec.runRef.name", "a.b"),
    ),
}
"""Changes that once showed a bug, tried whatever the seed says."""


@pytest.fixture(scope="module")
def installed(plane: Mapping[str, Any]) -> None:
    process.install(plane)


@pytest.fixture(scope="module")
def api(plane: Mapping[str, Any], installed: None) -> Api:
    return Api(plane)


@pytest.fixture(scope="module")
def operator(
    plane: Mapping[str, Any], installed: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    with process.running(plane, tmp_path_factory.mktemp("operator")) as found:
        yield found


@pytest.fixture(scope="module")
def tally(operator: Running) -> Iterator[list[Outcome]]:
    """What became of the changes of all kinds, for the figures."""
    found: list[Outcome] = []
    yield found
    if not ASKED:
        return
    counts = {each: sum(one.verdict is each for one in found) for each in Verdict}
    figures.record(
        "faults",
        mutations=len(found),
        mutations_refused=counts[Verdict.REFUSED],
        mutations_accepted=len(found) - counts[Verdict.REFUSED],
        mutations_declined=counts[Verdict.DECLINED],
        mutations_at_fault=sum(bool(each.faults) for each in found),
        mutations_seed=SEED,
        crashed=len(operator.troubles) + (not operator.is_ready),
    )


def known(kind: crd.CrdKind) -> list[cases.Mutation]:
    steps = {place.path: place.steps for place in schema.places(kind)}
    return [
        cases.Mutation(kind, steps[path], "found before", value)
        for path, value in FOUND.get(kind.name, ())
    ]


@cache
def made() -> Mapping[str, list[cases.Mutation]]:
    return {kind.name: cases.mutations(kind, SEED) for kind in BENCHED}


def chosen(kind: crd.CrdKind) -> list[cases.Mutation]:
    """As many of the changes of a kind as fall to it, and those that are always tried."""
    sizes = [len(each) for each in made().values()]
    shares = cases.shares(sizes, sum(sizes) if ASKED == "all" else int(ASKED or FEW))
    share = dict(zip(made(), shares, strict=True))[kind.name]
    return [*known(kind), *cases.sample(made()[kind.name], share, SEED)]


@pytest.mark.timeout(14_400)
@pytest.mark.parametrize("kind", BENCHED, ids=lambda kind: kind.name)
def test_a_change_is_refused_by_name_or_shows_and_can_be_taken_back(
    api: Api, operator: Running, tally: list[Outcome], kind: crd.CrdKind
) -> None:
    wanted = chosen(kind)
    found = outcomes(Crew(api, kind, BENCHES if ASKED else 3, print), wanted)
    tally += found
    faults = [f"{each.mutation}: {each.verdict}: {each.faults}" for each in found if each.faults]
    assert not faults, "\n".join([f"SEED={SEED}", *faults])
    assert operator.troubles == []
    assert operator.is_ready, f"SEED={SEED}"
    assert len(found) == len(wanted)
