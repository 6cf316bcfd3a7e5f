"""Pods killed one after the other: what dies comes back, and nothing else restarts."""

from tests.harness.e2e_cluster import weights
from tests.harness.e2e_cluster.scene import LAB, Object, Scene, step_of


def kill_the_trainer(scene: Scene) -> None:
    """The trainer goes; engines, rewards and environments stay; steps go on."""
    _kill(scene, "trainer")


def kill_the_engine(scene: Scene) -> None:
    """The engine goes; its replacement serves nothing older than what was current."""
    current = weights.published(scene)
    _kill(scene, "inference")
    version = weights.served(scene, at_least=current)
    scene.say(f"killed at version {current}; the replacement serves {version}, verified")


def kill_the_node_daemon(scene: Scene) -> None:
    """The daemon of the environments goes; what ran in it is repeated, or left out of training."""
    before = scene.run()["status"]["rollouts"]
    after = _kill(scene, "node")["status"]["rollouts"]
    lost = {name: after[name] - before[name] for name in ("retried", "masked")}
    scene.say(f"rollouts since: {lost['retried']} retried, {lost['masked']} masked")


def _kill(scene: Scene, role: str) -> Object:
    """Kill the one pod of a role as if it had lost its power, and see the run go on."""
    before = scene.pods()
    (victim,) = (each for each in before.values() if each.role == role)
    step = step_of(scene.run())
    scene.shell(f"kubectl -n {LAB} delete pod {victim.name} --grace-period=0 --force 2>&1")

    def is_back() -> bool:
        now = [each for each in scene.pods().values() if each.role == role]
        return [each.is_ready and each.uid != victim.uid for each in now] == [True]

    scene.wait(f"a new pod of {role}", is_back)
    scene.say(f"a new {role} is Ready; the run was at step {step}")
    run = scene.wait_for_run("two steps more", lambda run: step_of(run) >= step + 2)
    run = scene.wait_for_steps(2)
    scene.say(f"step {step_of(run)}; restarts: {run['status'].get('restarts', {}).get('total', 0)}")
    same(scene, {name: pod.uid for name, pod in before.items() if pod.role != role})
    return run


def same(scene: Scene, uids: dict[str, str]) -> None:
    """These pods are still those that they were.

    Raises:
        AssertionError: one was replaced.
    """
    now = {name: pod.uid for name, pod in scene.pods().items() if name in uids}
    assert now == uids
    scene.say(f"the same pods as before: {', '.join(sorted(uids))}")
