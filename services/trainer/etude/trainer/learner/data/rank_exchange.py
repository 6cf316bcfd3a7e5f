"""Exchange between the learner ranks that read a phase's data, over their process group."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from blake3 import blake3

from etude.common.errors import EtudeError, Problem, UserError
from etude.trainer.learner.batches import SupervisedSequence
from etude.trainer.learner.data.files import Block
from etude.trainer.learner.data.windows import RankExchange

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ProcessGroupExchange:
    """The ranks of the default process group; a single rank needs no group."""

    rank: int
    size: int

    def gather_objects(self, value: T) -> list[T]:
        """Gather one value of each rank, in rank order; collective."""
        if self.size == 1:
            return [value]
        # The actor is named by processes that must not load torch.
        import torch.distributed as dist  # noqa: PLC0415 - torch is heavy

        gathered: list[T] = [value] * self.size
        dist.all_gather_object(gathered, value)
        return gathered


class DataListing(NamedTuple):
    """Digests of the data that one rank opened, by name, or its error."""

    digests: Mapping[str, str]
    error: EtudeError | None = None


def check_same_data(own: DataListing, ranks: RankExchange) -> None:
    """Refuse data that is not the same on all ranks; collective, and fails on all ranks alike.

    Each rank lists the store itself. Ranks with other files would draw other batches, or wait for
    each other for ever.

    Raises:
        UserError: data differs; it is named.
        EtudeError: a rank could not open its data.
    """
    listings = ranks.gather_objects(own)
    for each in listings:
        if each.error is not None:
            raise each.error
    for name in {name: None for each in listings for name in each.digests}:
        first, *digests = [each.digests.get(name) for each in listings]
        others = [str(rank) for rank, digest in enumerate(digests, start=1) if digest != first]
        if others:
            raise UserError(
                Problem(
                    reason="InvalidData",
                    what=f"is not the same for rank 0 and for {', '.join(others)}: its files"
                    " changed while the phase started",
                    where=name,
                    fix="do not write to the data of a run; resume the run when the files are"
                    " complete",
                )
            )


def digest_blocks(blocks: Iterable[Block]) -> str:
    """Digest of the places and sizes of blocks."""
    digest = blake3()
    for block in blocks:
        place = (block.file.uri, block.file.size, block.start, block.num_bytes)
        digest.update(repr(place).encode())
    return digest.hexdigest()


def digest_sequences(sequences: Iterable[SupervisedSequence]) -> str:
    """Digest of the tokens and weights of sequences."""
    digest = blake3()
    for sequence in sequences:
        digest.update(sequence.token_ids.size.to_bytes(8, "little"))
        digest.update(sequence.token_ids.tobytes())
        digest.update(sequence.weights.tobytes())
    return digest.hexdigest()
