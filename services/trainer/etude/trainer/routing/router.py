"""Router of a rollout worker: its calls in flight, cached prompts, and engines that failed."""

import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from etude.trainer.routing.choice import choose_engine
from etude.trainer.routing.table import (
    EngineLoad,
    Loads,
    Purpose,
    RoutingTable,
    RoutingUpdate,
)
from etude.trainer.routing.token_slots import TokenSlots
from etude.trainer.seeding import derive_seed

AVOID_S = 5.0
"""Time that an engine is avoided after a failed call, while another one takes calls."""

MAX_GROUPS = 65_536
"""Groups whose cached prompts are remembered, the newest."""

EXPECTED_TOKENS = 256.0
"""Expected length of a completion before any is known."""

LENGTH_WEIGHT = 0.02
"""Weight of the newest completion in the mean length: about the last fifty count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingKey:
    """The call that an engine is chosen for."""

    group_id: str
    rollout_id: str
    call: int
    """Number of the call within the rollout."""
    prompt_tokens: int
    purpose: Purpose
    engine: str = ""
    """Engine of the rollout's call before; empty for its first."""
    engine_tokens: int = 0
    """Tokens of the prompt that this engine has processed."""


class RouteChoice(NamedTuple):
    """The engine of a call."""

    target: str
    is_suspect: bool
    """True if its last call failed a moment ago, and no better engine is there."""


@dataclass(slots=True)
class EngineTally:
    """Calls of this worker in flight on one engine."""

    calls: int = 0
    tokens: int = 0

    @property
    def load(self) -> EngineLoad:
        return EngineLoad(self.calls, self.tokens)


@dataclass(slots=True)
class CallInFlight:
    """One call as load of its engine."""

    tally: EngineTally
    tokens: int
    """Its prompt, and the tokens sampled so far."""

    def add_tokens(self, num_tokens: int) -> None:
        """Count tokens that were sampled."""
        self.tokens += num_tokens
        self.tally.tokens += num_tokens


@dataclass(slots=True)
class Router:
    """Chooses engines for the rollouts of one worker."""

    clock: Callable[[], float] = time.monotonic
    table: RoutingTable = field(default_factory=RoutingTable)
    mean_tokens: float = EXPECTED_TOKENS
    """Running mean of the lengths of completions."""
    token_slots: TokenSlots = field(default_factory=TokenSlots)
    _usable: frozenset[str] = frozenset()
    _tallies: dict[str, EngineTally] = field(default_factory=dict)
    _other_loads: Loads = field(default_factory=dict)
    _prompts: "OrderedDict[str, dict[str, int]]" = field(default_factory=OrderedDict)
    """Tokens of a group's prompt that each engine has cached, by group."""
    _avoided_until: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._usable = self.table.usable()
        self.token_slots.resize(self.table.token_slots)

    def update(self, update: RoutingUpdate) -> Loads:
        """Take an update of the controller; return this worker's own loads."""
        self.use_table(update.table)
        self._other_loads = update.other_loads
        return self.own_loads()

    def use_table(self, table: RoutingTable) -> None:
        """Take a table, unless a newer one is known."""
        if table.revision >= self.table.revision:
            self.table = table
            self._usable = table.usable()
            self.token_slots.resize(table.token_slots)

    def is_leaving(self, target: str) -> bool:
        """True if running calls must leave an engine: it drains, or is not in the table."""
        return target not in self._usable

    def own_loads(self) -> dict[str, EngineLoad]:
        """Load of this worker's calls on each engine."""
        return {target: tally.load for target, tally in self._tallies.items() if tally.calls}

    def choose(self, key: RoutingKey) -> RouteChoice | None:
        """Choose the engine of a call; None while none takes calls."""
        candidates = self.table.candidates(key.purpose)
        if not candidates:
            return None
        now_s = self.clock()
        good = [each for each in candidates if self._avoided_until.get(each, 0.0) <= now_s]
        if not good:
            first = min(candidates, key=self._avoided_until.__getitem__)
            return RouteChoice(first, is_suspect=True)
        cached = dict(self._prompts.get(key.group_id, {}))
        if key.engine:
            cached[key.engine] = key.engine_tokens
        target = choose_engine(
            self._costs(good),
            cached,
            prompt_tokens=key.prompt_tokens,
            seed=derive_seed(key.call, key.rollout_id),
        )
        return RouteChoice(target, is_suspect=False)

    @contextlib.contextmanager
    def track(self, target: str, key: RoutingKey) -> Iterator[CallInFlight]:
        """Count a call as load of its engine while the block runs."""
        tally = self._tallies.setdefault(target, EngineTally())
        call = CallInFlight(tally, 0)
        tally.calls += 1
        call.add_tokens(key.prompt_tokens)
        if not key.engine:
            self._remember_prompt(key.group_id, target, key.prompt_tokens)
        try:
            yield call
        finally:
            tally.calls -= 1
            tally.tokens -= call.tokens

    def note_completion(self, num_tokens: int) -> None:
        """Take the length of a finished completion into the mean."""
        self.mean_tokens += LENGTH_WEIGHT * (num_tokens - self.mean_tokens)

    def note_success(self, target: str) -> None:
        """Stop avoiding an engine that sampled."""
        self._avoided_until.pop(target, None)

    def note_failure(self, target: str) -> None:
        """Avoid an engine for a moment; what it had cached may be lost."""
        now_s = self.clock()
        if self._avoided_until.get(target, 0.0) <= now_s:
            for owners in self._prompts.values():
                owners.pop(target, None)
        self._avoided_until[target] = now_s + AVOID_S

    def _costs(self, targets: list[str]) -> Mapping[str, float]:
        none = EngineLoad()
        costs = {}
        for target in targets:
            load = self._other_loads.get(target, none)
            if (tally := self._tallies.get(target)) is not None:
                load = load.plus(tally.load)
            costs[target] = load.cost(self.mean_tokens)
        return costs

    def _remember_prompt(self, group_id: str, target: str, num_tokens: int) -> None:
        self._prompts.setdefault(group_id, {})[target] = num_tokens
        self._prompts.move_to_end(group_id)
        while len(self._prompts) > MAX_GROUPS:
            self._prompts.popitem(last=False)
