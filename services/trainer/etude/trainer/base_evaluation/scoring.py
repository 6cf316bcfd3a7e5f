"""Log-probs of texts and of continuations, by the policy module that the learner trains.

Shapes: B rows of a batch, T their padded length, N scored tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from etude.agent.chat.vocabulary import Vocabulary
from etude.trainer.model.policy import Policy

PAD = 0
"""Id of padding, which no scored token sees."""


Report = Callable[[int, int, int], None]
"""Called with the number of sequences or questions that are done, of all, and of their tokens."""


class TokenSequence(NamedTuple):
    """Tokens, and the place from which on they are scored."""

    token_ids: Sequence[int]
    first: int
    """At least 1: the first token has no context."""


@dataclass(frozen=True, slots=True)
class ModelScorer:
    """A model with its tokenizer."""

    policy: Policy
    vocabulary: Vocabulary
    context: int
    """Tokens of the longest sequence."""
    batch_tokens: int = 8_192
    """Tokens of one forward pass, padding included."""

    def score(
        self, sequences: Sequence[TokenSequence], *, report: Report | None = None
    ) -> list[float]:
        """Sum of the log-probs of each sequence's scored tokens, in nats."""
        order = sorted(range(len(sequences)), key=lambda index: len(sequences[index].token_ids))
        totals = [0.0] * len(sequences)
        done = tokens = 0
        for batch in self._batches(order, sequences):
            for index, total in zip(batch, self._score([sequences[i] for i in batch]), strict=True):
                totals[index] = total
            done += len(batch)
            tokens += sum(len(sequences[index].token_ids) for index in batch)
            if report is not None:
                report(done, len(sequences), tokens)
        return totals

    def _batches(
        self, order: Sequence[int], sequences: Sequence[TokenSequence]
    ) -> Iterator[list[int]]:
        batch: list[int] = []
        for index in order:  # the longest comes last, so it is the padded length
            if batch and len(sequences[index].token_ids) * (len(batch) + 1) > self.batch_tokens:
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch

    @torch.no_grad()
    def _score(self, batch: Sequence[TokenSequence]) -> list[float]:
        device = next(self.policy.parameters()).device
        longest = max(len(each.token_ids) for each in batch)
        ids = torch.full((len(batch), longest), PAD, dtype=torch.long)
        for row, each in enumerate(batch):
            ids[row, : len(each.token_ids)] = torch.as_tensor(each.token_ids)
        spans = [torch.arange(each.first, len(each.token_ids)) for each in batch]
        rows = torch.cat([torch.full_like(span, row) for row, span in enumerate(spans)])
        found = self.policy(ids.to(device), rows.to(device), torch.cat(spans).to(device))
        parts = found.logprobs.double().cpu().split([len(span) for span in spans])
        return [float(part.sum()) for part in parts]


def encode_choices(
    vocabulary: Vocabulary, prompt: str, choices: Sequence[str], *, context: int
) -> list[TokenSequence]:
    """Encode a prompt and each of its continuations, which are scored.

    A long prompt loses its beginning.
    """
    before = vocabulary.encode_text(prompt)
    found = []
    for choice in choices:
        after = vocabulary.encode_text(choice)
        ids = [*before, *after][-context:]
        found.append(TokenSequence(ids, max(1, len(ids) - len(after))))
    return found
