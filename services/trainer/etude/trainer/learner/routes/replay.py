"""Replay of routers in a phase: what is replayed, and the experts of a batch from the run's store.

Free of torch, so that the actor of a rank is named without loading it.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
from blake3 import blake3
from google.protobuf.message import DecodeError

from etude.common.api.meta import number
from etude.common.api.run.phases import Phase
from etude.common.api.run.router_replay import find_replay_problem
from etude.common.blobs import MissingError, Store
from etude.common.errors import CorruptError, InvalidFieldError, StoreError
from etude.common.routed_experts import ROUTES, ExpertIds, RouteRows
from etude.trainer.learner.batches import PolicyBatch, PolicySequence, StoredRoutes
from etude.trainer.learner.data.windows import RankExchange
from etude.v1 import routes_pb2

log = logging.getLogger(__name__)

READERS = 8
"""Objects that are read at once."""
READ_PAUSES_S = (0.5, 1.0, 2.0, 4.0)
"""Pauses between attempts to read an object; then its rollout is trained without."""


class Routers(Protocol):
    """Routers of a policy, as far as a phase sets them."""

    plausibility: float
    recomputes: bool

    @property
    def shape(self) -> tuple[int, int] | None:
        """Layers with experts and choices of a token; None if they cannot replay any."""
        ...


def replay_mode(phase: Phase) -> str:
    """Mode of a phase: Off, Recompute or Recorded."""
    return "Off" if phase.router_replay is None else phase.router_replay.mode


def start_replay(routers: Routers, phase: Phase) -> None:
    """Set the routers of a policy as a phase says.

    Raises:
        InvalidFieldError: they cannot replay experts, or not with this algorithm.
    """
    settings, where = phase.router_replay, f"phase {phase.name}: routerReplay"
    routers.plausibility = 0.0 if settings is None else number(settings.plausibility)
    routers.recomputes = settings is not None and settings.mode == "Recompute"
    if settings is None or settings.mode == "Off":
        return
    if routers.shape is None:
        raise InvalidFieldError(
            where, "the model has no routers that can replay experts; remove it"
        )
    if phase.algorithm is not None:
        name, parameters = phase.algorithm.name, phase.algorithm.parameters
        problem = find_replay_problem(settings.mode, name, parameters)
        if problem:
            raise InvalidFieldError(f"{where}.mode", problem)


class RoutedBatch(NamedTuple):
    """A batch with the recorded experts of its sequences, and figures about them."""

    batch: PolicyBatch
    figures: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteLoader:
    """Reads recorded experts of batches; every method is collective."""

    store: Store
    ranks: RankExchange
    pause: Callable[[float], None] = time.sleep

    def load(self, batch: PolicyBatch, shape: tuple[int, int] | None) -> RoutedBatch:
        """Add the experts that were recorded to the sequences of a batch.

        A rollout whose experts cannot be read, or are not of the model, is trained without, by all
        ranks alike.

        Args:
            batch: of a step.
            shape: layers with experts and choices of a token.
        """
        with ThreadPoolExecutor(READERS) as readers:
            routed = list(readers.map(lambda each: self._routes_of(each, shape), batch.sequences))
        refused = {
            sequence.rollout
            for sequence, routes in zip(batch.sequences, routed, strict=True)
            if routes is None
        }
        refused = set().union(*self.ranks.gather_objects(refused))
        sequences = tuple(
            replace(sequence, routes=None if sequence.rollout in refused else routes)
            for sequence, routes in zip(batch.sequences, routed, strict=True)
        )
        return RoutedBatch(replace(batch, sequences=sequences), _figures(sequences, refused))

    def _routes_of(
        self, sequence: PolicySequence, shape: tuple[int, int] | None
    ) -> ExpertIds | None:
        """Experts of a link; None if there are none that fit, or the store stays away."""
        stored = sequence.stored_routes
        if stored is None:
            return None
        for pause_s in (*READ_PAUSES_S, None):
            try:
                return read_routes(self.store, stored, tokens=len(sequence.token_ids), shape=shape)
            except (MissingError, CorruptError, InvalidFieldError) as error:
                log.warning("a rollout is trained without recorded experts: %s", error)
                return None
            except StoreError as error:
                log.warning("recorded experts cannot be read: %s", error)
            if pause_s is not None:
                self.pause(pause_s)
        return None


def read_routes(
    store: Store, stored: StoredRoutes, *, tokens: int, shape: tuple[int, int] | None
) -> ExpertIds:
    """Read the recorded experts of a link. [T, M, k].

    Args:
        store: of the run.
        stored: their place.
        tokens: of the link.
        shape: layers with experts and choices of a token.

    Raises:
        CorruptError: the object is not what was written.
        InvalidFieldError: it is another object, of other tokens or of another model.
        MissingError: there is none.
        StoreError: the store does not answer.
    """
    if not stored.key.startswith(ROUTES):
        raise InvalidFieldError("routes.key", f"{stored.key!r} is not below {ROUTES}")
    data = store.get(stored.key)
    where = f"{store.url}/{stored.key}"
    if blake3(data).hexdigest() != stored.digest:
        raise CorruptError(f"{where}: its digest is not {stored.digest}")
    try:
        rows = RouteRows.read(routes_pb2.RoutedExperts.FromString(data))
    except DecodeError as cause:
        raise CorruptError(f"{where}: {cause}") from cause
    if rows.start or len(rows.ids) != tokens:
        raise InvalidFieldError(where, f"rows {rows.start} to {rows.end} of {tokens} tokens")
    if rows.ids.shape[1:] != shape:
        raise InvalidFieldError(where, f"has {rows.ids.shape[1:]} a token, the model {shape}")
    return rows.ids


def copy_routes(source: Store, target: Store, keys: Iterable[str]) -> None:
    """Copy recorded experts to the same keys of another store.

    Those that are gone, or are not below routes/, are left out: their rollouts are trained without.

    Raises:
        StoreError: a store does not answer.
    """
    for key in sorted(each for each in keys if each.startswith(ROUTES)):
        try:
            target.put(key, source.get(key))
        except (MissingError, InvalidFieldError) as error:
            log.warning("recorded experts are left out: %s", error)


def _figures(sequences: Sequence[PolicySequence], refused: set[int]) -> dict[str, float]:
    """Share of the tokens whose experts are replayed, and rollouts without any."""
    tokens = sum(len(sequence.token_ids) for sequence in sequences)
    recorded = sum(_num_recorded(sequence.routes) for sequence in sequences)
    return {
        "replayed_fraction": recorded / tokens if tokens else 0.0,
        "unrecorded_rollouts": float(len(refused)),
    }


def _num_recorded(routes: ExpertIds | None) -> int:
    """Count the tokens that have every expert of every layer: others are routed again."""
    if routes is None or not routes.size:
        return 0
    return int((routes != np.iinfo(routes.dtype).max).all(axis=(1, 2)).sum())
