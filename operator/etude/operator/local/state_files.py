"""State files: local.json and objects.json, which the command line reads."""

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from etude.common.run_folder.state import LocalState, write_state
from etude.operator.kind_registry import KINDS
from etude.operator.local import run_folder
from etude.operator.local.process_cluster import ProcessCluster, ProcessKubelet
from etude.operator.manifests import Manifest, Ref

log = logging.getLogger(__name__)

INTERVAL_S = 0.5
SHOWN_EVENTS = 20


@dataclass(slots=True)
class StateFiles:
    """Writes local.json and objects.json after changes, at most twice a second."""

    folder: Path
    pid: int
    cluster: ProcessCluster
    kubelet: ProcessKubelet
    run: Ref
    _last: LocalState | None = None
    _objects: list[Manifest] = field(default_factory=list)
    _is_failing: bool = False

    async def keep_writing(self) -> None:
        while True:
            self.write()
            await asyncio.sleep(INTERVAL_S)

    def write(self) -> None:
        """Write the changed files; a full disk does not stop the run."""
        try:
            self._write()
        except OSError as error:
            if not self._is_failing:
                log.warning("%s cannot be written: %s; free some space", self.folder, error)
            self._is_failing = True
        else:
            self._is_failing = False

    def _write(self) -> None:
        objects = [m for kind in KINDS for m in self.cluster.list_objects(kind.name)]
        if objects != self._objects:
            run_folder.save_objects(self.folder, objects)
            self._objects = objects
        state = self._state()
        if self._last is None or _without_time(state) != _without_time(self._last):
            write_state(self.folder, state)
            self._last = state

    def _state(self) -> LocalState:
        recent = deque(self.cluster.events, maxlen=SHOWN_EVENTS)
        return LocalState(
            pid=self.pid,
            updated_unix_ms=int(time.time() * 1000),
            run=self.cluster.get(self.run) or {},
            pools=tuple(self.cluster.list_objects("EnvPool")),
            pods=tuple(self.kubelet.pods(self.cluster)),
            events=tuple(_event_line(event) for event in recent),
        )


def _without_time(state: LocalState) -> LocalState:
    return state.model_copy(update={"updated_unix_ms": 0})


def _event_line(event: Manifest) -> str:
    clock = event["eventTime"][11:19]
    about = event["regarding"]
    return f"{clock} {about['kind']} {about['name']} {event['reason']}: {event['note']}"
