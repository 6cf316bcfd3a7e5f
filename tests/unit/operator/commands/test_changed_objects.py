"""The changes that tests/cluster/test_mutations.py tries on an API server, judged without one."""

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
from pydantic import ValidationError
from tests.harness.mutations import cases, produced, schema, shown
from tests.harness.mutations.cases import Mutation
from tests.harness.mutations.lab import OPEN, names

from etude.common.api.kinds import Checkpoint, EnvPool, EvalRun, PolicyRoute, RLRun
from etude.common.api.meta import BrokenRulesError
from etude.common.api.schema import crd
from etude.operator.commands.render import render_children

MODELS: Mapping[str, type[RLRun | EnvPool | Checkpoint | EvalRun | PolicyRoute]] = {
    "RLRun": RLRun,
    "EnvPool": EnvPool,
    "Checkpoint": Checkpoint,
    "EvalRun": EvalRun,
    "PolicyRoute": PolicyRoute,
}
SEED = 0
FEW = 800
"""Of each kind; a third of them are taken, and each costs a run's manifests."""
ELSEWHERE = re.compile(r"workload$")
"""Kinds of workload that are not for a cluster without their controllers."""


def refusal(mutation: Mutation) -> list[str] | None:
    """What the models say against a change, with the field of each; None if they take it."""
    try:
        body = json.loads(cases.dumped(mutation.body()))
        MODELS[mutation.kind.name].model_validate(body)
    except ValidationError as error:
        return [said for each in error.errors() for said in words(each)]
    except ValueError:
        return [mutation.path]  # no JSON: the API server says the same of any
    return None


def words(error: Any) -> list[str]:
    where = schema.dotted(tuple(error["loc"]))
    cause = error.get("ctx", {}).get("error")
    broken = cause.rules if isinstance(cause, BrokenRulesError) else ()
    return [f"{where}{rule.field_path}: {rule.message}" for rule in broken] or [where]


@pytest.mark.parametrize("kind", crd.KINDS, ids=lambda kind: kind.name)
def test_a_change_that_is_refused_is_refused_by_the_name_of_its_field(kind: crd.CrdKind) -> None:
    tried = [(each, refusal(each)) for each in cases.mutations(kind, SEED) if each.top]
    refused = [(each, " ".join(said)) for each, said in tried if said is not None]
    assert len(refused) > 50
    assert [f"{each}: {said}" for each, said in refused if not names(said, each)] == []


@pytest.mark.parametrize("kind", [crd.RLRUN, crd.ENV_POOL], ids=lambda kind: kind.name)
def test_a_change_that_is_taken_shows_in_what_is_made_of_the_object(kind: crd.CrdKind) -> None:
    few = cases.sample(cases.mutations(kind, SEED), FEW, SEED)
    taken = [each for each in few if each.top and refusal(each) is None]
    faults = []
    for each in taken:
        if OPEN.search(each.path) or ELSEWHERE.search(each.path):
            continue
        body = each.body()
        made = render_children(json.loads(cases.dumped(body)), produced.PLATFORMS[0])
        children = {(child["kind"], child["metadata"]["name"]): child for child in made}
        whole = json.loads(cases.dumped(body))
        faults += [f"{each}: {fault}" for fault in shown.differences(whole, children)]
    assert len(taken) > 100
    assert faults == []


def test_shares_are_even_as_far_as_there_is_enough() -> None:
    assert cases.shares([200, 4_000, 800], 60) == [20, 20, 20]
    assert cases.shares([200, 4_000, 800], 1_500) == [200, 650, 650]
    assert cases.shares([5, 5], 100) == [5, 5]


def test_a_refusal_may_name_what_was_made_for_the_field_alone_and_nothing_above_it() -> None:
    def named(path: str) -> tuple[str, ...]:
        steps = {place.path: place.steps for place in schema.places(crd.ENV_POOL)}
        return cases.changed(Mutation(crd.ENV_POOL, steps[path], "", 1))

    assert named("spec.autoscaling.refill.maxInFlight") == ("autoscaling", "refill", "maxInFlight")
    assert named("spec.network.rules[0].host") == ("host",)
    assert named("spec.templates[0].egress[0]") == ("egress",)
