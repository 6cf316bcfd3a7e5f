"""Start weights of a run from another run's checkpoint."""

from etude.common.api.kinds import Checkpoint, RLRun
from etude.operator.conditions import is_condition_true
from etude.operator.kube.interface import Cluster
from etude.operator.manifests import Manifest, is_true, ref

REASONS_WITH_MODEL = ("Window", "PhaseEnd", "Final", "Manual", "Imported")
"""Reasons of checkpoints that hold a model folder beside the learner's state."""


def model_folder(checkpoint: Checkpoint) -> str:
    """The Hugging Face folder of a checkpoint."""
    return f"{checkpoint.saved_state.uri.rstrip('/')}/model"


def start_weights_problem(run: RLRun, checkpoint: Checkpoint | None) -> str:
    """The sentence that refuses the named checkpoint as start weights; empty where it is fine.

    A model that was resolved once stays resolved, also when its checkpoint is deleted.

    Args:
        run: the run.
        checkpoint: the Checkpoint that it names, if there is one.
    """
    ref, resolved = run.spec.model.checkpoint_ref, run.status.resolved
    if ref is None or (resolved is not None and resolved.model_uri is not None):
        return ""
    field = "spec.model.checkpointRef.name"
    if checkpoint is None:
        return f"{field}: no Checkpoint {ref.name} in this namespace: create it or name another"
    if not is_condition_true(checkpoint.status.conditions, "Ready"):
        phase = checkpoint.status.phase or "not verified yet"
        return f"{field}: {ref.name} is {phase}, not Ready"
    reason = checkpoint.spec.reason
    if reason not in REASONS_WITH_MODEL:
        allowed = ", ".join(REASONS_WITH_MODEL)
        return f"{field}: {ref.name} is {reason} and holds no model; name one of {allowed}"
    return ""


def start_sources(cluster: Cluster, namespace: str) -> frozenset[str]:
    """Names of the checkpoints that runs of a namespace start from, or that are in other use.

    Those are evaluated now, served, or tried.
    """
    named = (
        *((run, referenced_checkpoints(run)) for run in cluster.list_objects("RLRun")),
        *((each, _evaluated(each)) for each in cluster.list_objects("EvalRun")),
        *((each, _served(each)) for each in cluster.list_objects("PolicyRoute")),
    )
    return frozenset(
        name for owner, found in named if ref(owner).namespace == namespace for name in found
    )


def _evaluated(evaluation: Manifest) -> list[str]:
    """Name of the checkpoint of an evaluation that is not over."""
    if is_true(evaluation, "Complete") or is_true(evaluation, "Failed"):
        return []
    checkpoint = evaluation["spec"].get("checkpointRef")
    return [checkpoint["name"]] if checkpoint else []


def _served(route: Manifest) -> list[str]:
    """Names of the checkpoints that a route serves or tries: the next one is compared with them."""
    status = route.get("status") or {}
    found = (status.get(part) or {} for part in ("stable", "canary", "candidate"))
    return [each["checkpoint"] for each in found if each.get("checkpoint")]


def referenced_checkpoints(run: Manifest) -> list[str]:
    """Names of the checkpoints that one run starts from or resumes from."""
    spec = run["spec"]
    refs = (
        spec.get("model", {}).get("checkpointRef"),
        spec.get("checkpointing", {}).get("resumeFrom"),
    )
    return [ref["name"] for ref in refs if ref and ref.get("name")]
