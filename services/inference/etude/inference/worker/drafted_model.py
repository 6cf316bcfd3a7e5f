"""A model and the draft that guesses for it, whose weights are of one version."""

from collections.abc import Iterable

import torch

CHANGED = "etude_changed_parameters"
"""Attribute of a loaded model: names of parameters that post-processing changed, and of matrices
that it derived from them."""


class DraftedModel(torch.nn.Module):
    """Both as one model; tensors that they share are one parameter."""

    def __init__(self, model: torch.nn.Module, draft: torch.nn.Module) -> None:
        """Join both.

        Raises:
            RuntimeError: the draft does not compute from its parameters.
        """
        changed = getattr(draft, CHANGED, None)
        if changed is None or changed:
            raise RuntimeError(
                f"the draft does not compute from its parameters {(changed or [])[:4]}: set"
                " roles.inference.engine.speculativeTokens: 0"
            )
        super().__init__()
        self.model = model
        self.draft = draft

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load tensors of a checkpoint, each where it belongs."""
        given = list(weights)
        for part in (self.model, self.draft):
            part.load_weights(given)  # type: ignore[operator]  # vLLM's models have it
