"""The Job that reads or deletes the data of one checkpoint."""

import hashlib
import json

from etude.common.api.kinds import Checkpoint, RLRun
from etude.common.checkpoints.job import VARIABLE
from etude.operator import names
from etude.operator.actions import Apply
from etude.operator.builders.platform import Platform
from etude.operator.builders.pod import SCRATCH_FOLDER, PodResources, RolePod, env, job_spec
from etude.operator.builders.run_spec import resolved_spec

VERIFY = "verify"
DELETE = "delete"

DATA_JOB = ("python", "-m", "etude.operator.checkpoints.data_job")
LOAD_JOB = ("python", "-m", "etude.trainer.commands.check_checkpoint")


def job_name(checkpoint: Checkpoint, what: str) -> str:
    """Name of the Job for one action on one checkpoint, by uid; short, as pods carry it as a label.

    A checkpoint that is imported again under its old name must not inherit the old result.
    """
    identity = hashlib.sha256(checkpoint.metadata.uid.encode()).hexdigest()[:8]
    # No dot-separated part of a name may end in a hyphen.
    return f"{checkpoint.metadata.name[:50].rstrip('-.')}-{identity}-{what[:3]}"


def data_job(checkpoint: Checkpoint, run: RLRun | None, what: str, platform: Platform) -> Apply:
    """A Job that reaches the store with the run's own Secret; the operator never does itself.

    Args:
        checkpoint: to verify or delete.
        run: of the checkpoint, if it still exists; for verify: Load.
        what: VERIFY or DELETE.
        platform: configuration of the operator.
    """
    of_run = checkpoint.spec.run_ref
    labels = {
        names.MANAGED_BY: names.MANAGER,
        names.CHECKPOINT: names.label(checkpoint.metadata.name),
    }
    if of_run is not None:
        labels[names.SAVED_BY] = of_run.name
    whose = {names.CHECKPOINT: checkpoint.metadata.name}
    is_load = what == VERIFY and checkpoint.spec.verify == "Load"
    pod = (
        _loading_pod(checkpoint, run, platform)
        if is_load
        else _data_pod(checkpoint, what, platform)
    )
    manifest = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": job_name(checkpoint, what),
            "namespace": checkpoint.metadata.namespace,
            "labels": labels,
            "annotations": whose,
        },
        "spec": job_spec(pod, labels, whose),
    }
    return Apply(manifest=manifest, manager=names.CHECKPOINT_FIELD_MANAGER)


def _data_pod(checkpoint: Checkpoint, what: str, platform: Platform) -> RolePod:
    return RolePod(
        role=names.JANITOR,
        image=platform.images["operator"],
        command=DATA_JOB,
        ports={},
        env=[env(VARIABLE, _order(checkpoint, what, None))],
        secret=_secret(checkpoint),
        grace_s=30,
    )


def _loading_pod(checkpoint: Checkpoint, run: RLRun | None, platform: Platform) -> RolePod:
    """The pod that loads a checkpoint has the image and the memory of the run's trainer."""
    image, memory, model = platform.images["trainer"], None, None
    about = checkpoint.spec.run_ref
    if run is not None and about is not None and about.uid in {None, run.metadata.uid}:
        role = run.spec.roles.trainer
        pinned = run.status.resolved.images if run.status.resolved is not None else {}
        image = role.image or pinned.get(names.TRAINER, image)
        source = resolved_spec(run).model
        memory, model = role.memory, None if source.uri is None else source.key
    return RolePod(
        role=names.JANITOR,
        image=image,
        command=LOAD_JOB,
        ports={},
        env=[env(VARIABLE, _order(checkpoint, VERIFY, model)), env("HOME", SCRATCH_FOLDER)],
        resources=PodResources(memory=memory),
        secret=_secret(checkpoint),
        grace_s=30,
    )


def _order(checkpoint: Checkpoint, what: str, model: str | None) -> str:
    storage = checkpoint.storage
    assert storage is not None  # noqa: S101 - a written checkpoint has storage
    order = {
        "action": what,
        "uri": checkpoint.saved_state.uri,
        "digest": checkpoint.saved_state.manifest_digest,
        "storage": storage.to_json(),
        "depth": checkpoint.spec.verify,
    }
    return json.dumps(order | ({} if model is None else {"model": model}), sort_keys=True)


def _secret(checkpoint: Checkpoint) -> str | None:
    storage = checkpoint.storage
    secret = storage.secret_ref if storage is not None else None
    return secret.name if secret is not None else None
