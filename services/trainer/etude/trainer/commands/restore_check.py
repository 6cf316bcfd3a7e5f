"""Restore check: a learner and a controller are restored from a checkpoint, and discarded."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor
from typing_extensions import override

from etude.common.blobs import MissingError, Store
from etude.common.errors import CorruptError
from etude.trainer.controller.checkpoints.state import CONTROLLER, ControllerState
from etude.trainer.learner import checkpoint
from etude.trainer.learner.phase import PhaseManager
from etude.trainer.model.fsdp import RankGroup
from etude.trainer.model.parameters import StepObserver
from etude.trainer.model.policy import load_policy


class _Unwatched(StepObserver):
    """Observer of steps that never happen."""

    @override
    def wants(self, name: str) -> bool:
        return False

    @override
    @contextmanager
    def observe_step(self, name: str, parameter: Tensor) -> Iterator[None]:
        yield


def check_controller(store: Store, folder: str) -> None:
    """Check the controller's half of a checkpoint.

    Raises:
        CorruptError: it is missing, or of another format.
    """
    key = folder + CONTROLLER
    try:
        ControllerState.model_validate_json(store.get(key))
    except (MissingError, ValidationError) as cause:
        raise CorruptError(f"{store.url}/{key}: {cause}") from cause


def check_learner(store: Store, prefix: str, model: Path | None) -> None:
    """Check the learner's half of a checkpoint by restoring it into a model.

    Args:
        store: opened at the checkpoint's prefix.
        prefix: of the learner's objects.
        model: folder with the model's config.json; None decodes every tensor, and fits none.

    Raises:
        CorruptError: it is damaged, or of another model.
    """
    if model is None:
        checkpoint.read_state(store, prefix)
        return
    alone = RankGroup(rank=0, size=1, device=torch.device("cpu"))
    phases = PhaseManager(load_policy(model, seed=0), alone, steps=_Unwatched())
    phases.restore(store, prefix)
