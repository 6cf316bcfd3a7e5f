"""Progress of an evaluation over all its measures, with the time that is left."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from etude.trainer.base_evaluation.scoring import Report

REPORT_EVERY_S = 2.0


@dataclass(slots=True, kw_only=True)
class EvaluationProgress:
    """Writes a row on progress every few seconds; a token takes the same time in all measures."""

    num_tokens: int
    """Of all measures."""
    write: Callable[[dict[str, object]], None]
    clock: Callable[[], float] = time.monotonic
    _begin_s: float = field(init=False)
    _written_s: float = field(init=False)
    _done: int = 0
    """Tokens of measures so far, with those of the one that runs."""

    def __post_init__(self) -> None:
        self._begin_s = self._written_s = self.clock()

    def follow(self, what: str) -> Report:
        """Begin a measure, whose unit is named as in `questions`."""
        before = self._done

        def report(done: int, total: int, tokens: int) -> None:
            self._done, now_s = before + tokens, self.clock()
            if now_s - self._written_s < REPORT_EVERY_S:
                return
            self._written_s = now_s
            left = max(0, self.num_tokens - self._done)
            row: dict[str, object] = {"progress": what, "done": done, "of": total}
            row["share"] = round(self._done / max(1, self.num_tokens), 3)
            row["left_s"] = round((now_s - self._begin_s) * left / max(1, self._done))
            self.write(row)

        return report
