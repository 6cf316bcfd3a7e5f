"""What one learner rank is told when it starts."""

from dataclasses import dataclass, field
from pathlib import Path

from etude.common.api.run import Storage
from etude.common.api.weights import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerConfig:
    """One of world_size processes that train the same weights together.

    Every rank must get every call, with equal arguments and in the same order.
    """

    run: str
    """UID of the run."""
    holder: str
    """Who publishes, for people: the pod's name."""
    model_folder: Path
    """Hugging Face folder on this machine; without weight files in it they are drawn from seed."""
    seed: int = 0
    storage: Storage
    """Where versions and checkpoints go."""
    weights: Weights = field(default_factory=Weights)
    """How versions are written; exports share the number format."""
    micro_batch_tokens: int = 8_192
    """Padded tokens of one forward and backward pass."""
    threads: int = 1
    """CPU threads of this rank; one makes every step repeatable bit for bit."""
    rank: int = 0
    world_size: int = 1
    rendezvous: str = ""
    """Where more than one rank meets: tcp://host:port, or file:///path that does not exist yet."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is outside [0, {self.world_size})")
        if self.world_size > 1 and not self.rendezvous:
            raise ValueError(f"{self.world_size} ranks need a rendezvous")
