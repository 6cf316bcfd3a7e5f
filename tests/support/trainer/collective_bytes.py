"""Bytes that a rank's collectives carry, by operation."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override


class CollectiveBytes(TorchDispatchMode):
    """Counts the bytes of the complete tensor of each collective inside a block."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        if func.namespace in {"c10d", "_c10d_functional"} and not any(
            part in func.name() for part in ("wait_", "wrap_")
        ):
            name = func.name().partition("::")[2].strip("_")
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            self.calls[name] += 1
            self.bytes[name] += max(t.numel() * t.element_size() for t in tensors)
        return func(*args, **(kwargs or {}))
