"""Exchange of encoded data between learner ranks, over their process group."""

from dataclasses import dataclass

from etude.trainer.learner.data.windows import EncodedShare


@dataclass(frozen=True, slots=True)
class ProcessGroupExchange:
    """The ranks of the default process group; a single rank needs no group."""

    rank: int
    size: int

    def gather_objects(self, value: EncodedShare) -> list[EncodedShare]:
        """Gather one value of each rank, in rank order; collective."""
        if self.size == 1:
            return [value]
        # The actor is named by processes that must not load torch.
        import torch.distributed as dist  # noqa: PLC0415 - torch is heavy

        gathered: list[EncodedShare] = [value] * self.size
        dist.all_gather_object(gathered, value)
        return gathered
