"""Checkpoint check: loads one checkpoint as a trainer would; the operator runs it as a Job."""

import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from pydantic import ValidationError

from etude.common.blobs import MissingError, Store
from etude.common.checkpoints.job import (
    CheckpointOrder,
    order_from_env,
    retry_store_errors,
    run_or_exit,
    verify_checkpoint,
)
from etude.common.checkpoints.manifest import CONTROLLER, MODEL, CheckpointManifest
from etude.common.errors import CorruptError
from etude.common.model_sources.run_model import find_run_model
from etude.common.stores import open_run_store, open_source
from etude.trainer.controller.checkpoints.state import ControllerState

CONFIG = "config.json"
LEARNER = "learner"


def load(store: Store, digest: str, *, model: Store | None) -> None:
    """Read a whole checkpoint back, and restore it into a learner on the CPU.

    Args:
        store: opened at the checkpoint's prefix.
        digest: SHA-256 of its manifest.
        model: opened at a folder with the model's config.json; None for the checkpoint's own.

    Raises:
        CorruptError: something is missing, differs from what was registered, cannot be decoded, or
            does not fit the model.
        StoreError: the store failed.
    """
    manifest = verify_checkpoint(store, digest)
    folder = manifest.state_folder
    _check_controller(store, folder)
    config = _config(store, manifest, model)
    with TemporaryDirectory() as name:
        scratch = Path(name)
        if config is not None:
            (scratch / CONFIG).write_bytes(config)
        _check_learner(store, folder + LEARNER, scratch if config is not None else None)


def _check_controller(store: Store, folder: str) -> None:
    """Check the controller's half of a checkpoint.

    Raises:
        CorruptError: it is missing, or of another format.
    """
    key = folder + CONTROLLER
    try:
        ControllerState.model_validate_json(store.get(key))
    except (MissingError, ValidationError) as cause:
        raise CorruptError(f"{store.url}/{key}: {cause}") from cause


def _check_learner(store: Store, prefix: str, model: Path | None) -> None:
    """Check the learner's half of a checkpoint by restoring it into a model.

    Raises:
        CorruptError: it is damaged, or of another model.
    """
    # Torch comes once it is known that there is something to load.
    import torch  # noqa: PLC0415

    from etude.trainer.learner.checkpoint import index, reader  # noqa: PLC0415
    from etude.trainer.learner.phase import PhaseManager, read_lora  # noqa: PLC0415
    from etude.trainer.model.fsdp import RankGroup  # noqa: PLC0415
    from etude.trainer.model.policy import load_policy  # noqa: PLC0415

    saved = index.read_indexes(store, prefix)
    if model is None:
        reader.verify_blocks(store, saved)
        return
    alone = RankGroup(rank=0, size=1, device=torch.device("cpu"))
    policy = load_policy(model, seed=0, lora=read_lora(saved.state))
    PhaseManager(policy, alone).restore(store, prefix)


def _config(store: Store, manifest: CheckpointManifest, model: Store | None) -> bytes | None:
    """Read the model's configuration; None if neither the run nor the checkpoint has it.

    Raises:
        CorruptError: the model's folder holds none.
    """
    own = f"{MODEL}/{CONFIG}"
    if any(item.key == own for item in manifest.objects):
        return store.get(own)
    try:
        return None if model is None else model.get(CONFIG)
    except MissingError as cause:
        raise CorruptError(f"{model.url if model else ''}/{CONFIG}: is missing") from cause


def carry_out(order: CheckpointOrder) -> None:
    """Check the checkpoint that the order names.

    Raises:
        CorruptError: it differs from what was registered, or cannot be loaded.
        StoreError: the store stayed away.
    """
    folder = order.model
    if folder is not None:
        folder = find_run_model(folder, open_run_store(order.storage.uri, order.storage))
    model = None if folder is None else open_source(folder, order.storage)
    store = open_run_store(order.uri, order.storage)
    retry_store_errors(lambda: load(store, order.digest, model=model))


def main(env: Mapping[str, str] = os.environ) -> None:
    """Carry out the order in ETUDE_ORDER."""
    run_or_exit(lambda: carry_out(order_from_env(env)))


if __name__ == "__main__":
    main()
