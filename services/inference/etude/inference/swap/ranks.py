"""Calls to all ranks of one forward pass: combines their answers, or raises one's error."""

import asyncio
import logging
from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple, Protocol

from etude.common.errors import CorruptError, UnavailableError
from etude.common.weights.replicas.regions import Regions
from etude.common.weights.tensors.digest import ZERO, Digest
from etude.common.weights.tensors.schema import Schema
from etude.inference.worker import coverage
from etude.inference.worker.coverage import ComputedParameterError

log = logging.getLogger(__name__)

FIRST_POLL_S = 0.002
LAST_POLL_S = 0.1
"""Shortest and longest interval between polls of ranks that prepare or scan (backoff)."""


class RankError(UnavailableError):
    """A rank failed its part of a swap; the old version serves."""


class Ranks(Protocol):
    """The ranks of one forward pass; each has the methods of worker.rank.Rank."""

    async def call(self, method: str, *args: object) -> Sequence[Any]:
        """One answer per rank, between two forward passes.

        Raises:
            UnavailableError: the engine cannot go on.
        """


class MappedSchema(NamedTuple):
    """A schema mapped to the parameters of all ranks."""

    regions: Regions
    """Parts of the tensors that all ranks together hold."""
    state: Digest
    """Digest of the words in these regions."""
    uses_loader: bool
    """True if changed tensors go through the loader instead of being written in place."""


class PreparedSwap(NamedTuple):
    """A change that all ranks are ready to write."""

    change: Digest
    """Its difference to the state digest."""
    is_undoable: bool
    num_bytes: int
    """Memory that it holds on all ranks."""


async def build_map(ranks: Ranks, schema: Schema, *, may_load: bool) -> MappedSchema:
    """Map a schema to the live parameters, which are overwritten.

    Args:
        ranks: all of them.
        schema: of the policy.
        may_load: whether changed tensors may be loaded if they cannot be written in place.

    Raises:
        CorruptError: it does not describe the model.
        ComputedParameterError: no map reaches all of the model, and nothing may be loaded.
    """
    try:
        return await _build_map(ranks, schema, uses_loader=False)
    except ComputedParameterError as error:
        if not may_load:
            raise
        log.warning("changed tensors will be loaded, not written in place: %s", error)
        return await _build_map(ranks, schema, uses_loader=True)


async def _build_map(ranks: Ranks, schema: Schema, *, uses_loader: bool) -> MappedSchema:
    """Map a schema, and assign counted elements to ranks: see coverage.assign_counted()."""
    answers = await ranks.call("build_map", schema.to_bytes(), schema.sha256, uses_loader)
    maps = [coverage.decode_regions(answer["regions"]) for answer in _raise_errors(answers)]
    flags = await asyncio.to_thread(coverage.assign_counted, schema, maps)
    mine = {answer["identity"]: flag for answer, flag in zip(answers, flags, strict=True)}
    state = _sum_digests(await ranks.call("set_counted", mine))
    return MappedSchema(coverage.unite_regions(schema, maps), state, uses_loader)


async def wait_prepared(ranks: Ranks) -> PreparedSwap:
    """Wait for the result of "prepare" on all ranks.

    Raises:
        CorruptError: the staged file is not a publisher's.
        RankError: a rank has no memory for it, or fails.
        UnavailableError: the engine cannot go on.
    """
    answers = _raise_errors(await _poll_ranks(ranks, "poll_prepared"))
    return PreparedSwap(
        change=_sum_digests([answer["digest"] for answer in answers]),
        is_undoable=all(answer["is_undoable"] for answer in answers),
        num_bytes=sum(int(answer["num_bytes"]) for answer in answers),
    )


async def scan(ranks: Ranks) -> Digest:
    """State digest of all ranks, from the live words; no forward pass runs meanwhile."""
    return _sum_digests(await ranks.call("scan"))


async def scan_concurrently(ranks: Ranks) -> Digest:
    """State digest of all ranks, while forward passes run."""
    await ranks.call("start_scan")
    return _sum_digests(await _poll_ranks(ranks, "poll_scan"))


async def _poll_ranks(ranks: Ranks, method: str) -> Sequence[Any]:
    """Poll all ranks until each has answered."""
    wait_s = FIRST_POLL_S
    answers: Sequence[Any] = ()
    while True:
        now = await ranks.call(method)
        # A rank answers once, and ranks finish at different times.
        answers = [n if o is None else o for o, n in zip(answers or now, now, strict=True)]
        if all(answer is not None for answer in answers):
            return answers
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, LAST_POLL_S)


def _raise_errors(answers: Sequence[Any]) -> Sequence[Any]:
    for rank, answer in enumerate(answers):
        if answer["error"]:
            error = CorruptError if answer["is_corrupt"] else RankError
            if answer.get("is_computed"):
                error = ComputedParameterError
            raise error(f"rank {rank}: {answer['error']}")
    return answers


def _sum_digests(digests: Sequence[str]) -> Digest:
    return reduce(Digest.plus, map(Digest.parse, digests), ZERO)
