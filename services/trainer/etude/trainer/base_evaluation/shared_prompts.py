"""Log-probs of continuations of one prompt, whose shared tokens go through the model once.

Shapes: B prompts, P their padded length, R continuations, E their padded length, H hidden
size, N scored tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor

from etude.trainer.base_evaluation.scoring import PAD, ModelScorer, Report, TokenSequence
from etude.trainer.model.compute_device import is_gpu
from etude.trainer.model.logit_probe import backbone
from etude.trainer.model.output_head import score_tokens


class Branches(NamedTuple):
    """Sequences that begin alike."""

    prefix: Sequence[int]
    """Tokens that all of them begin with."""
    first: int
    """Place in the prefix from which on tokens are scored; its length if none is."""
    endings: Sequence[Sequence[int]]
    """Other tokens of each, one at least, all scored."""

    @property
    def is_long(self) -> bool:
        """True if an ending goes on after its first token, which the prefix alone predicts."""
        return any(len(each) > 1 for each in self.endings)


def split_branches(sequences: Sequence[TokenSequence]) -> Branches | None:
    """Split sequences after their shared tokens; None if their prompts differ."""
    first = sequences[0].first
    columns = zip(*(each.token_ids[:-1] for each in sequences), strict=False)
    shared = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
    if shared < first or any(each.first != first for each in sequences):
        return None
    endings = [each.token_ids[shared:] for each in sequences]
    return Branches(sequences[0].token_ids[:shared], first, endings)


def score_choices(
    scorer: ModelScorer,
    groups: Sequence[Sequence[TokenSequence]],
    *,
    report: Report | None = None,
) -> list[list[float]]:
    """Sum of the log-probs of each sequence's scored tokens, in nats, by group.

    Args:
        scorer: model.
        groups: sequences of one prompt each; where a prompt was cut to the context differently,
            sequences are scored one by one.
        report: called with the groups that are done, with all, and with the tokens of those that
            are done.
    """
    found = [split_branches(each) for each in groups]
    totals: dict[int, list[float]] = {}
    tokens = 0
    for batch in _batches(scorer, found):
        branches = [each for index in batch if (each := found[index]) is not None]
        totals |= zip(batch, _PrefixPass(scorer, branches).score(), strict=True)
        tokens += sum(count_tokens(groups[index]) for index in batch)
        if report is not None:
            report(len(totals), len(groups), tokens)
    for index, sequences in enumerate(groups):
        if index not in totals:
            totals[index] = scorer.score(sequences)
            tokens += count_tokens(sequences)
            if report is not None:
                report(len(totals), len(groups), tokens)
    return [totals[index] for index in range(len(groups))]


def count_tokens(sequences: Sequence[TokenSequence]) -> int:
    """Tokens of the longest of the sequences, which is nearly all that goes through the model."""
    return max(len(each.token_ids) for each in sequences)


def _batches(scorer: ModelScorer, found: Sequence[Branches | None]) -> Iterator[list[int]]:
    """Groups of one pass; prefixes that longer endings go on from have one length in it.

    Padding would come between those prefixes and their endings.
    """
    order = sorted(
        (each.is_long, len(each.prefix), index)
        for index, each in enumerate(found)
        if each is not None
    )
    batch: list[int] = []
    first, rows = (False, 0), 0
    for is_long, length, index in order:
        branches = found[index]
        assert branches is not None  # noqa: S101 - chosen above
        # Every longer ending needs its copy of the keys and values of its prefix.
        added = len(branches.endings) if is_long else 1
        is_other = first[0] != is_long or (is_long and first[1] != length)
        if batch and (is_other or length * (rows + added) > scorer.batch_tokens):
            yield batch
            batch, rows = [], 0
        if not batch:
            first = (is_long, length)
        batch.append(index)
        rows += added
    if batch:
        yield batch


@dataclass(frozen=True, slots=True)
class _PrefixPass:
    """Forward passes over some prefixes, and over what follows them."""

    scorer: ModelScorer
    batch: Sequence[Branches]

    @torch.no_grad()
    def score(self) -> list[list[float]]:
        """Sums of the log-probs of each group's sequences."""
        endings = [(row, each) for row, group in enumerate(self.batch) for each in group.endings]
        is_long = any(each.is_long for each in self.batch)
        output = self._forward([each.prefix for each in self.batch], use_cache=is_long)
        if is_long and not hasattr(output.past_key_values, "batch_select_indices"):
            return self._score_apart()  # states of another kind than keys and values
        hidden = output.last_hidden_state
        shared = [
            self._sum(hidden[row, each.first - 1 : len(each.prefix) - 1], each.prefix[each.first :])
            for row, each in enumerate(self.batch)
        ]
        rows = [row for row, _ in endings]
        places = [len(self.batch[row].prefix) - 1 for row in rows]
        first_tokens = [ending[0] for _, ending in endings]
        firsts = self._logprobs(hidden[rows, places], first_tokens).tolist()
        rest = [0.0] * len(endings)
        if is_long:
            rest = self._score_rest(output.past_key_values, endings)
        totals: list[list[float]] = [[] for _ in self.batch]
        for (row, _), head, tail in zip(endings, firsts, rest, strict=True):
            totals[row].append(shared[row] + head + tail)
        return totals

    def _score_apart(self) -> list[list[float]]:
        """Score every sequence with a prefix of its own."""
        return [
            self.scorer.score(
                [TokenSequence([*each.prefix, *ending], each.first) for ending in each.endings]
            )
            for each in self.batch
        ]

    def _score_rest(
        self,
        cache: Any,  # noqa: ANN401 - transformers'
        endings: Sequence[tuple[int, Sequence[int]]],
    ) -> list[float]:
        """Sums of the log-probs of each ending's tokens behind its first."""
        rows = torch.tensor([row for row, _ in endings])
        cache.batch_select_indices(rows.to(self._device))
        inputs = [ending[:-1] for _, ending in endings]
        hidden = self._forward(inputs, past_key_values=cache, use_cache=True).last_hidden_state
        return [
            self._sum(hidden[place, : len(ending) - 1], ending[1:])
            for place, (_, ending) in enumerate(endings)
        ]

    def _forward(self, rows: Sequence[Sequence[int]], **options: Any) -> Any:  # noqa: ANN401 - transformers'
        """Pass rows, padded on the right, where no real token sees the padding."""
        ids = torch.full((len(rows), max(1, *map(len, rows))), PAD, dtype=torch.long)
        for row, each in enumerate(rows):
            ids[row, : len(each)] = torch.as_tensor(each, dtype=torch.long)
        device = self._device
        with torch.autocast(device.type, torch.bfloat16, enabled=is_gpu(device)):
            return backbone(self.scorer.policy.model)(input_ids=ids.to(device), **options)

    def _sum(self, hidden: Tensor, tokens: Sequence[int]) -> float:
        return float(self._logprobs(hidden, tokens).sum()) if len(tokens) else 0.0

    def _logprobs(self, hidden: Tensor, tokens: Sequence[int]) -> Tensor:
        """Log-probs of tokens by the hidden states before them.  [N, H] -> [N]."""
        policy = self.scorer.policy
        head = policy.model.get_output_embeddings()
        ids = torch.as_tensor(tokens, device=hidden.device)
        found = score_tokens(
            hidden, ids, weight=head.weight, bias=head.bias, transform=policy.transform
        )
        return found.logprobs.double().cpu()

    @property
    def _device(self) -> torch.device:
        return next(self.scorer.policy.parameters()).device
