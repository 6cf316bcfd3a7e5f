"""A simulated run: waves of groups, training steps between them, and GPUs that may have to wait."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from autoscaler_bench.events import Clock
from autoscaler_bench.plans import Planner
from autoscaler_bench.pool import Pool, Waiting
from autoscaler_bench.traces import Ask, Trace
from etude.trainer.controller.admission.plans import WAVES as PLANNED

FIRST_S = 120.0
"""Before the first wave the run loads its model."""


@dataclass(slots=True)
class Run:
    """The trainer of a trace."""

    clock: Clock
    pool: Pool
    trace: Trace
    planner: Planner | None = None
    launches: list[float] = field(default_factory=list)
    """When each wave began."""
    idle_s: float = 0.0
    """GPU-seconds that went by while environments were waited for."""
    is_over: bool = False
    _waiting: int = 0
    _running: int = 0
    _since_s: float = 0.0
    """When the numbers above changed last."""
    _finished: int = 0
    """Environments whose rollouts no step has taken."""
    _steps: int = 0
    _is_training: bool = False

    def start(self) -> None:
        """Begin once the model is loaded."""
        self.clock.after(FIRST_S, self._begin)

    def _begin(self) -> None:
        self._launch(self.trace.in_flight)

    def _launch(self, count: int) -> None:
        """The next waves, at once."""
        waves = self.trace.waves[len(self.launches) :]
        if not waves:
            return
        self.launches += [self.clock.now_s] * count
        asks = [ask for wave in waves[:count] for ask in wave]
        self._account()
        self._waiting += len(asks)
        if self.planner is not None:
            following = waves[count : count + PLANNED]
            self.planner.launched(_counts(asks), [_counts(wave) for wave in following])
        for ask in asks:
            self.pool.ask(Waiting(ask, self.clock.now_s, self._granted, self._ended(ask)))

    def _granted(self) -> None:
        self._account()
        self._waiting -= 1
        self._running += 1

    def _ended(self, ask: Ask) -> Callable[[], None]:
        def ended() -> None:
            self._account()
            self._running -= 1
            self._finished += 1
            if self.planner is not None:
                self.planner.ended(ask)
            self._train()

        return ended

    def _train(self) -> None:
        """Take the next step as soon as as many rollouts are there as a wave has."""
        if self._is_training or self._finished < len(self.trace.waves[self._steps]):
            return
        self._is_training = True
        if self.planner is not None:
            self.planner.stepped()
        self._finished -= len(self.trace.waves[self._steps])
        self.clock.after(self.trace.training_s[self._steps], self._trained)

    def _trained(self) -> None:
        self._is_training = False
        self._steps += 1
        if self._steps == len(self.trace.waves):
            self.is_over = True
            return
        self._launch(1)
        self._train()

    def _account(self) -> None:
        """A synchronous step waits for its last environment, an asynchronous one for each."""
        if self._waiting:
            wanted = self._waiting + self._running
            share = 1.0 if self.trace.in_flight == 1 else self._waiting / wanted
            self.idle_s += self.trace.gpus * share * (self.clock.now_s - self._since_s)
        self._since_s = self.clock.now_s


def _counts(wave: Sequence[Ask]) -> Counter[str]:
    return Counter(ask.template for ask in wave)
