"""Diagnosis of a route: what keeps its users unserved, or its newest checkpoint from them."""

from collections.abc import Iterator

from etude.cli.kubectl.diagnose.diagnosis import Diagnosis, RunState
from etude.cli.kubectl.diagnose.evaluations import (
    PASSING,
    NamespaceObjects,
    condition_blocker,
    diagnose_evaluation,
    make_diagnosis,
    refused_blocker,
)
from etude.cli.kubectl.diagnose.pods import Blocker
from etude.cli.kubectl.manifests import Manifest, condition_of, name_of

ROUTE = "etude.dev/route"
_KIND = "route"
_STUCK = frozenset({RunState.STANDS_STILL, RunState.FAILED})


def diagnose_route(route: Manifest, around: NamespaceObjects) -> Diagnosis:
    """Diagnose a route: first what users do without, then what keeps a candidate from them."""
    name, status = name_of(route), route.get("status", {})
    is_serving = condition_of(route, "Available").get("status") == "True"
    blockers = list(_find_blockers(route, around))
    if blockers:
        first, *others = blockers
        state = RunState.SERVES if is_serving else RunState.UNSERVED
        if not is_serving and first.reason in PASSING:
            state = RunState.WAITS
        more = [f"also, {each.cause}" for each in others]
        return make_diagnosis(_KIND, name, state, first, *more)
    question = (status.get("test") or {}).get("question", "")
    if question:
        asked = Blocker("PersonAsked", "its comparison with users asks a person", (question,))
        return make_diagnosis(_KIND, name, RunState.SERVES, asked, *_describe_channels(route))
    candidate = condition_of(route, "CandidateProposed") or condition_of(route, "Available")
    stuck = (diagnose_evaluation(each, around) for each in _owned_evaluations(route, around))
    evaluation = next((each for each in stuck if each.state in _STUCK), None)
    if evaluation is not None:
        words = f"evaluation {evaluation.sentence}"
        found = Blocker(evaluation.reason, words, evaluation.evidence, evaluation.do)
        return make_diagnosis(_KIND, name, RunState.SERVES, found, *_describe_channels(route))
    described = condition_blocker(candidate)
    return make_diagnosis(_KIND, name, RunState.SERVES, described, *_describe_channels(route))


def _find_blockers(route: Manifest, around: NamespaceObjects) -> Iterator[Blocker]:
    """Blockers of the route itself, the first cause first."""
    refused = refused_blocker(route)
    if refused is not None:
        yield refused
        return
    status = route.get("status", {})
    found = list(around.blockers(ROUTE, name_of(route)))
    yield from (each for each in found if each.reason not in PASSING)
    proposed = condition_of(route, "CandidateProposed")
    if not (status.get("stable") or {}).get("version") and _takes_feedback(route):
        # Engines are not ready before the first version is promoted.
        named = proposed if proposed.get("reason") == "NoStableVersion" else {}
        yield condition_blocker({"reason": "NoStableVersion", **named})
        return
    is_tried = bool((status.get("canary") or {}).get("version"))
    if is_tried or not _is_complete(route):  # engines of a canary channel without a version wait
        yield from (each for each in found if each.reason in PASSING)
    for kind, bad in (("Available", "False"), ("FeedbackAvailable", "False"), ("Degraded", "True")):
        condition = condition_of(route, kind)
        if not found and condition.get("status") == bad:
            yield condition_blocker(condition)


def _takes_feedback(route: Manifest) -> bool:
    return condition_of(route, "FeedbackAvailable").get("status") == "True"


def _is_complete(route: Manifest) -> bool:
    """True if users are served and their feedback is taken."""
    kinds = ("Available", "FeedbackAvailable")
    return all(condition_of(route, kind).get("status") == "True" for kind in kinds)


def _owned_evaluations(route: Manifest, around: NamespaceObjects) -> Iterator[Manifest]:
    """Evaluations of the newest candidate and of what it is compared with."""
    candidate = route.get("status", {}).get("candidate") or {}
    if candidate.get("action"):
        return  # it was proposed
    for each in around.evaluations:
        if name_of(each) == candidate.get("evaluation"):
            yield each
            wanted = (each["spec"].get("comparison") or {}).get("baselineRef", {}).get("name")
            yield from (other for other in around.evaluations if name_of(other) == wanted)


def _describe_channels(route: Manifest) -> Iterator[str]:
    """Versions in use and under test, and the newest decision, in words."""
    status = route.get("status", {})
    stable, canary = status.get("stable") or {}, status.get("canary") or {}
    if stable.get("version"):
        yield f"{stable['version']} is in use since {stable.get('since', 'an unknown time')}"
    share = (status.get("test") or {}).get("share")
    if share and canary.get("version"):
        yield f"{share} of the users try {canary['version']}"
    decision = status.get("decision") or {}
    if decision.get("sentence"):
        yield f"newest decision, {decision.get('action')}: {decision['sentence']}"
