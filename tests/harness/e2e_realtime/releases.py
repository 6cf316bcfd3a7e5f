"""A release: a window is trained, evaluated, tried by users, promoted, and taken back."""

from collections import Counter

from tests.harness.e2e_cluster.scene import LAB, WAIT_S, Object, Scene, condition
from tests.harness.e2e_realtime.route import (
    ROUTE,
    find_users,
    ready_checkpoints,
    route,
)
from tests.harness.e2e_realtime.users import Users

FIRST = "1.0"
TABLES = f"kubectl -n {LAB} get policyroute,evalrun -o wide"


def train_a_window(scene: Scene) -> None:
    """Users work with the first version; a window of their rollouts becomes the next one."""
    users = find_users(scene)
    before = len(ready_checkpoints(scene))
    _visit(scene, users, liked=FIRST)
    scene.wait("a Checkpoint of a window", lambda: len(ready_checkpoints(scene)) > before)
    scene.shell(f"kubectl -n {LAB} get rlr,ckpt")


def promote_a_candidate(scene: Scene) -> None:
    """The operator evaluates it beside the one in use; users try it, keep its edits, and get it."""
    users = find_users(scene)
    version = _wait_for_canary(scene)
    scene.shell(TABLES)
    _visit(scene, users, liked=version)
    scene.wait("the promotion", lambda: _decision(scene)["action"] == "Promote")
    found = route(scene)["status"]
    assert found["stable"]["version"] == version, found
    scene.say(found["decision"]["sentence"])
    _check_withdrawn(scene, users, FIRST)


def roll_it_back(scene: Scene) -> None:
    """A person takes it back: users have the version before, or try a newer one."""
    version = str(route(scene)["status"]["stable"]["version"])
    order = f"kubectl etude rollback {ROUTE} -n {LAB} --version {version}"
    scene.shell(f"{order} --reason 'answers are too long' 2>&1")
    scene.wait("the version before", lambda: route(scene)["status"]["stable"]["version"] == FIRST)
    _check_withdrawn(scene, find_users(scene), version)


def show_the_cycle(scene: Scene) -> None:
    """Objects at the end, as people look at them."""
    scene.shell(TABLES)
    scene.shell(f"kubectl -n {LAB} describe policyroute {ROUTE}")
    scene.shell(f"kubectl -n {LAB} describe evalrun | head -150")


def _check_withdrawn(scene: Scene, users: Users, version: str) -> None:
    """Nobody gets a version any more, once engines and gateways have followed their channels."""

    def is_withdrawn() -> bool:
        return version not in {each.version for each in users.visit(liked=version)}

    scene.wait(f"no user of {version}", is_withdrawn)
    assert not users.num_failed, f"{users.num_failed} requests failed"
    scene.say(f"no user is served by {version} any more")


def _visit(scene: Scene, users: Users, liked: str) -> None:
    seen = users.visit(liked)
    versions = Counter(each.version for each in seen)
    num_edits = sum(len(each.edits) for each in seen)
    counts = ", ".join(f"{count} with {name}" for name, count in sorted(versions.items()))
    scene.say(f"users: {counts}; {users.num_requests} requests, {num_edits} edits")
    assert not users.num_failed, f"{users.num_failed} requests failed"


def _wait_for_canary(scene: Scene) -> str:
    """The version that users try, once its engine serves it."""
    found: list[str] = []

    def is_tested() -> bool:
        status = route(scene)["status"]
        canary = status.get("canary") or {}
        version = canary.get("version", "")
        found[:] = [version]
        return bool(status.get("test")) and canary.get("engines") == "1/1"

    # Two evaluations, one after the other, start an engine each.
    scene.wait("a canary", is_tested, 3 * WAIT_S)
    scene.say(f"{found[0]} is tried by users; {_proposed(route(scene))}")
    return found[0]


def _proposed(found: Object) -> str:
    about = condition(found, "CandidateProposed")
    return f"CandidateProposed {about.get('reason')}: {about.get('message')}"


def _decision(scene: Scene) -> Object:
    found: Object = route(scene)["status"].get("decision") or {"action": ""}
    return found
