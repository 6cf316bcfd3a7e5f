"""Recorder of rows and rollouts for people; it waits for the store, and never fails the run."""

import asyncio
import logging
import threading
from collections.abc import Awaitable
from dataclasses import dataclass, field

from etude.common.errors import EtudeError
from etude.common.run_folder.record import RunRecord
from etude.common.store_retry import StoreRefusal
from etude.trainer.controller.reporting.rows import Row

log = logging.getLogger(__name__)

ROWS_EVERY_S = 0.5
"""Rows are written in batches: an object store takes tens of milliseconds for each."""

KEPT_ROWS = 100_000
"""Newest rows to keep while the store is unreachable: days of steps, in tens of megabytes."""

LAST_WRITES_S = 60.0
"""Longest wait for rollouts that are still being written when the run is over."""


@dataclass(slots=True)
class RunRecorder:
    """Writes rows and rollouts to the run's record."""

    record: RunRecord
    refusal: StoreRefusal = field(default_factory=StoreRefusal)
    _rows: list[Row] = field(default_factory=list)
    """Changed in place only, atomically: a thread writes rows while others are added."""
    _writing: threading.Lock = field(default_factory=threading.Lock)
    _writes: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def problem(self) -> str:
        """Last error of the record; empty while it works."""
        return self.refusal.message

    def add_row(self, row: Row) -> None:
        """Queue a row of metrics.jsonl."""
        self._rows.append(row)

    async def write_rows(self) -> None:
        """Write queued rows; those that cannot be written stay queued."""
        await asyncio.to_thread(self.write_rows_now)

    def write_rows_now(self) -> None:
        """Write queued rows without an event loop."""
        with self._writing:
            rows = self._rows.copy()
            if not rows:
                return
            try:
                self.record.append(rows)
            except (OSError, EtudeError) as error:
                log.warning("%d rows are not written yet: %s", len(rows), error)
                self.refusal.record(str(error))
                del self._rows[:-KEPT_ROWS]
            else:
                self.refusal.clear()
                del self._rows[: len(rows)]

    async def keep_writing(self) -> None:
        """Write rows until cancelled."""
        while True:
            await asyncio.sleep(ROWS_EVERY_S)
            await self.write_rows()

    def write_rollouts(self, what: str, work: Awaitable[None]) -> None:
        """Have rollouts written in the background, which is awaited at the end of the run only."""

        async def write() -> None:
            try:
                await work
            except (OSError, EtudeError) as error:
                log.warning("%s are not written: %s", what, error)

        task = asyncio.create_task(write(), name=what)
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)

    async def wait_rollouts(self, limit_s: float) -> None:
        """Wait for the rollouts that are being written, up to a limit."""
        if self._writes:
            await asyncio.wait(tuple(self._writes), timeout=limit_s)

    async def finish(self) -> None:
        """Write the rest; give up on a store that does not answer."""
        await self.wait_rollouts(LAST_WRITES_S)
        await self.write_rows()
