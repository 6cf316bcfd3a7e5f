"""Looks at what a real engine computes with: label and words of every forward pass.

The words are read from the model's own parameters, with a map written down here: nothing of what
moves versions is used.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tests.harness.chaos.engines.policy import FUSED, SHAPES
from tests.harness.chaos.journal import Journal

_PLACES = {
    name: (fused, sum(rows for _, rows in parts[:place]))
    for fused, parts in FUSED.items()
    for place, (name, _) in enumerate(parts)
}
"""In which parameter of a layer, and from which row on, a tensor is."""


@dataclass(slots=True)
class Observer:
    """Writes down each new pair of label and words, as a forward pass sees them."""

    core: Any
    """vLLM's engine core."""
    model: torch.nn.Module
    journal: Journal
    last: tuple[str, str] = ("", "")

    def watch(self) -> None:
        """Look at every pass from now on; passes and swaps share one thread."""
        executor = self.core.model_executor
        execute = executor.execute_model

        def watched(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            if not scheduled.total_num_scheduled_tokens:  # a pass of no request computes nothing
                return execute(scheduled, *args, **kwargs)
            label, sha = self.core.get_weight_version(), self.sha256()
            answer = execute(scheduled, *args, **kwargs)
            if (label, sha) != self.last:
                after = self.core.get_weight_version()
                self.journal.write("pass", label=label, after=after, sha=sha)
                self.last = (label, sha)
            return answer

        executor.execute_model = watched

    def sha256(self) -> str:
        """Of all live words in checkpoint order."""
        found = hashlib.sha256()
        for words in self._words():
            found.update(words.data)
        return found.hexdigest()

    def _words(self) -> Iterator[npt.NDArray[np.uint8]]:
        live = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        for name, shape in SHAPES.items():
            *layer, room, kind, leaf = name.split(".")
            fused, row = _PLACES.get(f"{room}.{kind}.{leaf}", (f"{room}.{kind}.{leaf}", 0))
            tensor = live[".".join([*layer, fused])][row : row + shape[0]]
            yield tensor.contiguous().view(torch.int16).numpy().reshape(-1).view(np.uint8)
