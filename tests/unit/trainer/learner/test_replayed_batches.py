"""Recorded experts of a batch, read from the run's store and verified, and settings of a phase."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import pytest
from blake3 import blake3

from etude.common.api.run.phases import Phase
from etude.common.blobs import MemoryStore
from etude.common.errors import InvalidFieldError, StoreError
from etude.common.routed_experts import ExpertIds, RouteRows
from etude.trainer.learner.batches import PolicyBatch, PolicySequence, StoredRoutes
from etude.trainer.learner.routes.replay import RouteLoader, copy_routes, start_replay

T = TypeVar("T")
SHAPE = (2, 2)
LENGTHS = (5, 3, 7)


@dataclass(slots=True)
class Ranks:
    """A rank beside others that report what they are told to."""

    others: Sequence[Any] = ()
    rank: int = 0
    size: int = 1
    gathered: list[Any] = field(default_factory=list)

    def gather_objects(self, value: T) -> list[T]:
        self.gathered.append(value)
        return [value, *self.others]


def routes_of(length: int, *, layers: int = 2) -> ExpertIds:
    found: ExpertIds = np.random.default_rng(length).integers(0, 8, (length, layers, 2))
    ids = found.astype(np.uint8)
    ids[-1] = 255
    return ids


def write(store: MemoryStore, rollout: int, routes: ExpertIds, *, start: int = 0) -> StoredRoutes:
    data, key = RouteRows(start, routes).message().SerializeToString(), f"routes/g/g-{rollout}"
    store.put(key, data)
    return StoredRoutes(key, blake3(data).hexdigest())


def batch(stored: Sequence[StoredRoutes | None]) -> PolicyBatch:
    sequences = tuple(
        PolicySequence(
            token_ids=np.arange(length, dtype=np.int32),
            loss_mask=np.arange(length) > 0,
            sampler_logprobs=np.zeros(length, dtype=np.float32),
            rollout=rollout,
            stored_routes=stored[rollout],
        )
        for rollout, length in enumerate(LENGTHS)
    )
    return PolicyBatch(
        sequences=sequences,
        rewards=np.zeros(3),
        groups=np.zeros(3, dtype=np.int64),
        valid=np.ones(3, dtype=np.bool_),
    )


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def stored(store: MemoryStore) -> list[StoredRoutes | None]:
    return [write(store, n, routes_of(length)) for n, length in enumerate(LENGTHS)]


def test_sequences_get_the_experts_that_were_stored(
    store: MemoryStore, stored: list[StoredRoutes | None]
) -> None:
    found, figures = RouteLoader(store=store, ranks=Ranks()).load(batch(stored), SHAPE)
    for sequence, length in zip(found.sequences, LENGTHS, strict=True):
        assert sequence.routes is not None
        assert (sequence.routes == routes_of(length)).all()
    assert figures == {"replayed_fraction": 12 / 15, "unrecorded_rollouts": 0.0}


def test_a_token_that_lacks_an_expert_in_any_layer_does_not_count_as_replayed(
    store: MemoryStore, stored: list[StoredRoutes | None]
) -> None:
    routes = routes_of(LENGTHS[0])
    routes[0, 1, 1] = 255
    stored[0] = write(store, 0, routes)
    _, figures = RouteLoader(store=store, ranks=Ranks()).load(batch(stored), SHAPE)
    assert figures["replayed_fraction"] == 11 / 15


@pytest.mark.parametrize(
    "damage", ["changed", "gone", "longer", "moved", "of another model", "elsewhere", "no record"]
)
def test_a_rollout_whose_experts_are_not_those_of_its_tokens_is_trained_without(
    store: MemoryStore, stored: list[StoredRoutes | None], damage: str
) -> None:
    assert stored[1] is not None
    match damage:
        case "changed":
            store.put(stored[1].key, b"other")
        case "gone":
            store.delete([stored[1].key])
        case "longer":
            stored[1] = write(store, 1, routes_of(4))
        case "moved":
            stored[1] = write(store, 1, routes_of(3), start=1)
        case "of another model":
            stored[1] = write(store, 1, routes_of(3, layers=3))
        case "elsewhere":
            stored[1] = stored[1]._replace(key="../weights/1")
        case _:
            stored[1] = None
    found, figures = RouteLoader(store=store, ranks=Ranks()).load(batch(stored), SHAPE)
    assert [s.routes is None for s in found.sequences] == [False, True, False]
    assert figures["unrecorded_rollouts"] == 1
    assert figures["replayed_fraction"] == 10 / 15


def test_what_one_rank_cannot_read_no_rank_replays(
    store: MemoryStore, stored: list[StoredRoutes | None]
) -> None:
    ranks = Ranks(others=({2},))
    found, figures = RouteLoader(store=store, ranks=ranks).load(batch(stored), SHAPE)
    assert ranks.gathered == [set()]
    assert [s.routes is None for s in found.sequences] == [False, False, True]
    assert figures["unrecorded_rollouts"] == 1


def test_a_store_that_is_away_for_a_moment_is_asked_again(
    store: MemoryStore, stored: list[StoredRoutes | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    get = store.get

    def fail_once(key: str) -> bytes:
        asked.append(key)
        if asked.count(key) == 1:
            raise StoreError("away")
        return get(key)

    monkeypatch.setattr(store, "get", fail_once)
    loader = RouteLoader(store=store, ranks=Ranks(), pause=lambda _: None)
    assert loader.load(batch(stored), SHAPE).figures["unrecorded_rollouts"] == 0


@dataclass(slots=True)
class Routers:
    shape: tuple[int, int] | None = SHAPE
    plausibility: float = 0.0
    recomputes: bool = False


def phase(replay: dict[str, object] | None, algorithm: dict[str, Any] | None = None) -> Phase:
    return Phase.model_validate(
        {
            "name": "rl",
            "type": "ReinforcementLearning",
            "maxSteps": 5,
            "optimizer": {"learningRate": "1e-2"},
            "tasks": [{"name": "train", "uri": "file:///tasks", "environment": "repos"}],
            "algorithm": algorithm or {"name": "DrGRPO"},
            "routerReplay": replay,
        }
    )


def test_a_phase_sets_the_plausibility_and_the_next_one_sets_it_back() -> None:
    routers = Routers()
    start_replay(routers, phase({"plausibility": "0.5"}))
    assert routers.plausibility == 0.5
    start_replay(routers, phase(None))
    assert routers.plausibility == 0


def test_a_model_without_routers_is_refused_by_field() -> None:
    with pytest.raises(InvalidFieldError, match="phase rl: routerReplay: the model has no routers"):
        start_replay(Routers(shape=None), phase({"mode": "Recorded"}))
    start_replay(Routers(shape=None), phase({"mode": "Off"}))
    start_replay(Routers(shape=None), phase(None))


@pytest.mark.parametrize(
    ("mode", "algorithm", "reason"),
    [
        ("Recorded", {"name": "GSPO"}, "4 updates per batch move away; set Recompute"),
        ("Recorded", {"name": "DrGRPO", "parameters": {"updatesPerBatch": 2}}, "set Recompute"),
        ("Recompute", {"name": "DrGRPO"}, "the same experts without replay; set Recorded"),
    ],
)
def test_a_mode_that_does_not_fit_the_updates_is_refused_by_field(
    mode: str, algorithm: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidFieldError, match=rf"routerReplay\.mode: .*{reason}"):
        start_replay(Routers(), phase({"mode": mode}, algorithm))


def test_fitting_modes_are_taken() -> None:
    routers = Routers()
    start_replay(routers, phase({"mode": "Recompute"}, {"name": "GSPO"}))
    assert routers.recomputes
    start_replay(routers, phase({}))
    assert not routers.recomputes


@pytest.mark.parametrize(
    "replay", [{"plausibility": "1"}, {"mode": "Off", "plausibility": "0.5"}, {"mode": "R3"}]
)
def test_settings_without_effect_are_refused(replay: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"plausibility|mode"):
        phase(replay)


def test_experts_that_a_batch_has_already_are_replaced_by_those_of_the_store(
    store: MemoryStore, stored: list[StoredRoutes | None]
) -> None:
    given = batch([None, *stored[1:]])
    first = replace(given.sequences[0], routes=routes_of(5))
    given = replace(given, sequences=(first, *given.sequences[1:]))
    found, _ = RouteLoader(store=store, ranks=Ranks()).load(given, SHAPE)
    assert found.sequences[0].routes is None


def test_a_replayed_step_has_copies_of_the_experts_that_are_still_there(
    store: MemoryStore, stored: list[StoredRoutes | None]
) -> None:
    gone, copies = stored[2], MemoryStore()
    assert gone is not None
    store.delete([gone.key])
    store.put("secret", b"x")
    given = batch(
        [
            stored[0],
            StoredRoutes(
                "secret",
                "",
            ),
            gone,
        ]
    )
    held = [each.stored_routes for each in given.sequences]
    copy_routes(store, copies, {each.key for each in held if each is not None})
    assert [info.key for info in copies.list("")] == ["routes/g/g-0"]
