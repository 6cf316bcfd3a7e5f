"""What a way of moving a version must offer to be measured."""

from typing import Any, NamedTuple, Protocol

from etude.common.weights.tensors.words import Words
from weights_bench.trajectory import Trajectory


class Sent(NamedTuple):
    """A version on the wire."""

    body: Any
    """What the contender's own receiver reads."""
    payload_bytes: int
    index_bytes: int

    @property
    def stored_bytes(self) -> int:
        """Everything but the manifest, which is the same kind of thing for all."""
        return self.payload_bytes + self.index_bytes


class Receiver(Protocol):
    """Live weights, and what stands ready beside them."""

    standing_bytes: int
    """Memory that it holds between versions, beyond the live weights."""

    def reset(self) -> None:
        """Return to the old version; not measured."""
        ...

    def stage(self, sent: Sent) -> object:
        """Verify and decode; no live weight changes."""
        ...

    def commit(self, staged: object) -> None:
        """Change the live weights."""
        ...

    def live(self) -> tuple[Words, ...]:
        """The live weights, tensor by tensor."""
        ...


class Contender(Protocol):
    """A codec with the sender and the receiver that go with it."""

    name: str
    standing_at_sender: float
    """Memory that its sender must hold between versions, as a share of the model."""

    def send(self, trajectory: Trajectory) -> Sent:
        """Encode the step from the old version to the new."""
        ...

    def receiver(self, trajectory: Trajectory) -> Receiver:
        """A receiver at the old version."""
        ...


def copies(words: tuple[Words, ...]) -> tuple[Words, ...]:
    """Writable copies."""
    return tuple(each.copy() for each in words)


def overwrite(target: tuple[Words, ...], source: tuple[Words, ...]) -> None:
    """Copy tensor by tensor."""
    for to, each in zip(target, source, strict=True):
        to[...] = each
