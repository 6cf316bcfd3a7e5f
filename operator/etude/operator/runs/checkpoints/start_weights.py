"""Start weights of a run from another run's checkpoint."""

from etude.common.api.kinds import Checkpoint, RLRun
from etude.operator.conditions import is_condition_true
from etude.operator.kube.interface import Cluster
from etude.operator.manifests import Manifest

REASONS_WITH_MODEL = ("PhaseEnd", "Final", "Manual", "Imported")
"""Reasons of checkpoints that hold a model folder beside the learner's state."""


def model_folder(checkpoint: Checkpoint) -> str:
    """The Hugging Face folder of a checkpoint."""
    return f"{checkpoint.saved_state.uri.rstrip('/')}/model"


def start_weights_problem(run: RLRun, found: Checkpoint | None) -> str:
    """The sentence that refuses the named checkpoint as start weights; empty where it is fine.

    A model that was resolved once stays resolved, also when its checkpoint is deleted.

    Args:
        run: the run.
        found: the Checkpoint that it names, if there is one.
    """
    ref, resolved = run.spec.model.checkpoint_ref, run.status.resolved
    if ref is None or (resolved is not None and resolved.model_uri is not None):
        return ""
    at = "spec.model.checkpointRef.name"
    if found is None:
        return f"{at}: there is no Checkpoint {ref.name} in this namespace"
    if not is_condition_true(found.status.conditions, "Ready"):
        return f"{at}: {ref.name} is {found.status.phase or 'not looked at yet'}, not Ready"
    if found.spec.reason not in REASONS_WITH_MODEL:
        wanted = ", ".join(REASONS_WITH_MODEL)
        return f"{at}: {ref.name} is {found.spec.reason} and holds no model; name one of {wanted}"
    return ""


def start_sources(cluster: Cluster, namespace: str) -> frozenset[str]:
    """Names of the checkpoints that runs of a namespace start from."""
    return frozenset(
        name
        for run in cluster.list_objects("RLRun")
        if run["metadata"].get("namespace", "default") == namespace
        for name in referenced_checkpoints(run)
    )


def referenced_checkpoints(run: Manifest) -> list[str]:
    """Names of the checkpoints that one run starts from or resumes from."""
    spec = run["spec"]
    refs = (
        spec.get("model", {}).get("checkpointRef"),
        spec.get("checkpointing", {}).get("resumeFrom"),
    )
    return [ref["name"] for ref in refs if ref and ref.get("name")]
