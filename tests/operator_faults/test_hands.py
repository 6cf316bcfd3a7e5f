"""What somebody changes by hand on the children of a run is put right, and seen."""

from tests.operator_faults.lab import Lab
from tests.operator_faults.workloads import RUN, phase, saved, supervised

from etude.operator.manifests import Manifest

LABEL = "app.kubernetes.io/managed-by"
TRAINER = f"{RUN}-trainer"


def labelled(value: str | None) -> Manifest:
    return {"metadata": {"labels": {LABEL: value}}}


async def _trains(scene) -> None:
    await scene.create(supervised())
    await scene.until(lambda: phase(scene) == "Running")
    await saved(scene, 1)


async def test_a_run_whose_parts_lost_our_label_for_a_while_is_suspended_with_its_pods(
    lab: Lab,
) -> None:
    async with lab.scene() as scene, lab.acting(scene):
        await _trains(scene)
        for kind, name in (("Pod", f"{TRAINER}-0"), ("StatefulSet", TRAINER)):
            await scene.merge(kind, name, labelled(None))
            await scene.merge(kind, name, labelled("etude"))
        await scene.scenery.quiet(2.0)
        assert phase(scene) == "Running"
        await scene.merge("RLRun", RUN, {"spec": {"suspend": True}})
        await scene.until(lambda: scene.holds("RLRun", RUN, "Suspended"))
        assert not scene.scenery.every("Pod")
        assert scene.problems() == []


async def test_a_label_that_somebody_took_off_a_child_is_put_back(lab: Lab) -> None:
    async with lab.scene() as scene, lab.acting(scene):
        await _trains(scene)
        await scene.merge("StatefulSet", TRAINER, labelled(None))
        await scene.merge("RLRun", RUN, {"spec": {"checkpointing": {"keepLast": 5}}})
        await scene.until(
            lambda: scene.get("StatefulSet", TRAINER)["metadata"]["labels"].get(LABEL) == "etude"
        )
        await scene.scenery.quiet(2.0)
        assert phase(scene) == "Running"
        assert scene.problems() == []


async def test_what_chooses_pods_is_put_back_as_a_whole(lab: Lab) -> None:
    async with lab.scene() as scene, lab.acting(scene):
        await _trains(scene)
        wanted = scene.get("Service", TRAINER)["spec"]["selector"]
        await scene.merge("Service", TRAINER, {"spec": {"selector": {"a": "b"}}})
        await scene.until(lambda: scene.get("Service", TRAINER)["spec"]["selector"] == wanted)
        added = {"spec": {"podSelector": {"matchLabels": {"a": "b"}}}}
        await scene.merge("NetworkPolicy", TRAINER, added)
        await scene.until(
            lambda: (
                "a" not in scene.get("NetworkPolicy", TRAINER)["spec"]["podSelector"]["matchLabels"]
            )
        )
        assert scene.problems() == []
