"""Suspended, resumed, and trained to the end."""

from tests.harness.e2e_cluster.history import Change
from tests.harness.e2e_cluster.scene import LAB, PREFIX, RUN, Object, Scene, condition, step_of

from etude.common.run_folder.record import open_record

FURTHER = 3
"""Steps after the resumption; that many and the run is complete."""


def suspend(scene: Scene) -> None:
    """A checkpoint first, verified; then the pods go."""
    scene.watch()
    scene.shell(f"kubectl etude suspend {RUN} -n {LAB}")
    scene.wait_for_run("Suspended", lambda run: run["status"].get("phase") == "Suspended")
    scene.wait("no pod", lambda: scene.pods() == {})
    saved = _suspended_at(scene)
    assert condition(saved, "Ready")["status"] == "True"
    assert saved["spec"]["step"] == _steps(scene)[-1]
    ready = _ready_at(scene, saved["metadata"]["name"])
    going = _first_going(scene)
    assert ready.order < going.order, "a pod was told to go before the checkpoint was Ready"
    at = ready.body["metadata"]["resourceVersion"], going.body["metadata"]["resourceVersion"]
    scene.say(
        f"{saved['metadata']['name']} was Ready at change {at[0]}, the first pod went at {at[1]}"
    )
    scene.shell(f"kubectl -n {LAB} get rlr,ckpt,pods")
    scene.shell(f"kubectl etude why {RUN} -n {LAB}")


def resume(scene: Scene) -> None:
    """The next step is the one after the checkpoint, and the run ends Complete."""
    saved = _suspended_at(scene)
    phases = scene.run()["spec"]["phases"]
    phases[2]["maxSteps"] = step_of(scene.run()) + FURTHER
    scene.patch({"suspend": False, "phases": phases})
    done = scene.wait_for_run("Succeeded", lambda run: run["status"].get("phase") == "Succeeded")
    assert condition(done, "Complete")["status"] == "True"
    steps = _steps(scene)
    at = int(saved["spec"]["step"])
    after = steps[len(steps) - FURTHER :]
    assert after == list(range(at + 1, at + 1 + FURTHER)), f"{at} was saved; then came {after}"
    assert set(steps) == set(range(1, at + FURTHER + 1)), "a step is missing"
    scene.say(f"saved at step {at}; then came {after}, and the run is Complete")
    final = [each for each in scene.checkpoints() if each["spec"]["reason"] == "Final"]
    assert [each["status"]["phase"] for each in final] == ["Ready"]
    scene.wait("no pod", lambda: scene.pods() == {})
    scene.shell(f"kubectl -n {LAB} get rlr,envp,ckpt,pods -o wide")


def _suspended_at(scene: Scene) -> Object:
    """The newest one: a state that was saved on time a moment before is not saved again."""
    return max(scene.checkpoints(), key=lambda each: int(each["spec"]["step"]))


def _ready_at(scene: Scene, name: str) -> Change:
    """When a checkpoint was said to be Ready first."""
    return next(
        each
        for each in scene.histories["ckpt"].changes()
        if each.body["metadata"]["name"] == name
        and condition(each.body, "Ready").get("status") == "True"
    )


def _first_going(scene: Scene) -> Change:
    """When the first of the pods that were there last was told to go."""
    changes = scene.histories["pods"].changes()
    asked = next(
        each.order
        for each in scene.histories["rlr"].changes()
        if each.body["spec"].get("suspend") is True
    )
    return next(
        each
        for each in changes
        if each.order > asked
        and "deletionTimestamp" in each.body["metadata"]
        and each.body["metadata"]["labels"].get("etude.dev/run") == RUN
    )


def _steps(scene: Scene) -> list[int]:
    """The steps in the run's record, in the order written."""
    rows = open_record(scene.store(PREFIX)).rows()
    return [int(row["global_step"]) for row in rows if row["kind"] == "step"]
