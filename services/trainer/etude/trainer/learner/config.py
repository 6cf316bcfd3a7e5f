"""Configuration of one learner rank."""

from dataclasses import dataclass, field
from pathlib import Path

from etude.common.api.run.roles import Lora
from etude.common.api.run.weights import Weights
from etude.common.api.storage import Storage
from etude.common.blobs import Store
from etude.common.stores import open_source


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerConfig:
    """One of world_size processes that train the same weights together.

    Every rank must get every call, with equal arguments and in the same order.
    """

    run: str
    """UID of the run."""
    holder: str
    """The pod's name, shown to people as the publisher."""
    model_folder: Path
    """Local Hugging Face folder: configuration and tokenizer."""
    model_uri: str = ""
    """Store with the weight files, which ranks read by range; the folder unless given. Without any,
    weights are drawn from seed."""
    seed: int = 0
    storage: Storage
    """Where versions and checkpoints go."""
    weights: Weights = field(default_factory=Weights)
    """Encoding of versions; exports share the number format."""
    micro_batch_tokens: int = 8_192
    """Tokens of one forward and backward pass, padding included."""
    packing: str = "Auto"
    """Auto, Packed or Padded rows."""
    activation_checkpointing: str = "None"
    """None, Blocks or Selective."""
    compile_blocks: bool = False
    """Compile each block on its first pass."""
    lora: Lora | None = None
    """Adapters that are trained instead of all weights."""
    base_uri: str = ""
    """URI of the run's model, named in the export of adapters."""
    cpu_offload: bool = False
    """Keep weights, gradients and moments in the host's memory; several ranks only."""
    threads: int = 1
    """CPU threads of this rank; one makes every step repeatable bit for bit."""
    rank: int = 0
    world_size: int = 1
    replicas: int = 1
    """Copies of the weights, each sharded over world_size / replicas ranks."""
    context: int = 1
    """Ranks of one copy that share the tokens of each row."""
    expert: int = 1
    """Ranks of one copy that divide the experts of each layer."""
    rendezvous: str = ""
    """Address for several ranks: tcp://host:port, or file:///path that does not exist yet; known
    once rank 0 has a node."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is outside [0, {self.world_size})")
        if self.replicas < 1 or self.world_size % self.replicas:
            raise ValueError(f"{self.replicas} replicas of {self.world_size} ranks")
        for name in ("context", "expert"):
            ranks = getattr(self, name)
            if ranks < 1 or (self.world_size // self.replicas) % ranks:
                split = f"{self.world_size} ranks in {self.replicas} replicas"
                raise ValueError(f"{ranks} {name} ranks of {split}")

    def open_weights(self) -> Store | None:
        """Open the store with the weight files; None if they are in the model folder.

        Raises:
            UserError: the URI holds no files.
        """
        return open_source(self.model_uri, self.storage) if self.model_uri else None
