"""Local runs as their processes read them."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from etude.common.errors import Problem, UserError

if TYPE_CHECKING:
    from etude.common.run_folder.state import LocalState


class ResolvedState(NamedTuple):
    """State of a run's folder, and its run as its processes read it."""

    state: "LocalState"
    run: dict[str, Any]


def resolve_run(folder: Path) -> ResolvedState:
    """Read the run of a folder.

    Raises:
        UserError: the folder has no state of a run.
    """
    from etude.common.run_folder.state import read_state  # noqa: PLC0415 - keeps other verbs fast

    state = read_state(folder)
    if state is None or not state.run:
        fix = "give the folder of a run that was started here"
        raise UserError(Problem("NotFound", "has no state of a run", str(folder), fix))
    run: Any = state.run
    metadata, spec = run["metadata"], dict(run["spec"])
    model_uri = (run.get("status", {}).get("resolved") or {}).get("modelUri")
    if model_uri and spec["model"].get("checkpointRef"):
        model = {key: value for key, value in spec["model"].items() if key != "checkpointRef"}
        spec["model"] = model | {"uri": model_uri}
    resolved = {
        "name": metadata["name"],
        "uid": metadata.get("uid", metadata["name"]),
        "generation": metadata.get("generation", 1),
        "spec": spec,
    }
    return ResolvedState(state, resolved)
