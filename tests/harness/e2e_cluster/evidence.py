"""What is kept of a pass that failed."""

import shutil
from pathlib import Path

from tests.harness.e2e_cluster.bed import Bed, RefusedError

KINDS = "rlr,envp,ckpt,pods,statefulsets,jobs,events"


def collect(bed: Bed, folder: Path, namespaces: tuple[str, ...]) -> None:
    """Logs of every container that is or was, objects, events, and the logs of the node."""
    folder.mkdir(parents=True, exist_ok=True)
    for namespace in namespaces:
        home = ("-n", namespace)
        _keep(bed, folder / f"{namespace}.yaml", *home, "get", KINDS, "-o", "yaml")
        _keep(bed, folder / f"{namespace}.events", *home, "events")
        names = _keep(bed, folder / f"{namespace}.pods", *home, "get", "pods", "-o", "name")
        for pod in names.split():
            path = folder / f"{namespace}.{pod.removeprefix('pod/')}"
            _keep(bed, path.with_name(f"{path.name}.log"), *home, "logs", pod)
            _keep(bed, path.with_name(f"{path.name}.before.log"), *home, "logs", pod, "--previous")
    logs = Path(bed.state["run"]) / "log"
    if logs.exists():
        shutil.copytree(logs, folder / "node", dirs_exist_ok=True)


def _keep(bed: Bed, path: Path, *words: str) -> str:
    try:
        text = bed.kubectl(*words)
    except RefusedError as told:
        text = ""
        path.write_text(str(told), encoding="utf-8")
    else:
        path.write_text(text, encoding="utf-8")
    return text
