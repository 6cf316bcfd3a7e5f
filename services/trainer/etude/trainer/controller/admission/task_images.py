"""Images that the next tasks name by digest, read from their task.toml ahead of time."""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from etude.common.api.storage import StoreAccess
from etude.common.errors import CorruptError, StoreError, UserError
from etude.common.harbor import task_file
from etude.common.pinned_images import is_pinned
from etude.common.stores import open_run_store
from etude.trainer.rollouts.tasks import TASK_FILE, Task
from etude.v1 import plan_pb2

log = logging.getLogger(__name__)

_MAX_KNOWN = 100_000
"""Tasks whose image is remembered; a larger set is read again."""


@dataclass(slots=True, kw_only=True)
class TaskImageReader:
    """Reads which image each task needs. Without an answer the image is pulled later."""

    storage: StoreAccess = field(default_factory=StoreAccess)
    _known: dict[str, str] = field(default_factory=dict)
    """Images by the task's URI; empty for none."""

    async def read(self, tasks: Sequence[Task]) -> bool:
        """Read the tasks that are not known yet; returns true if there were any."""
        missing = [task.uri for task in tasks if task.uri not in self._known]
        if len(self._known) + len(missing) > _MAX_KNOWN:
            self._known.clear()
        for uri in missing:
            self._known[uri] = await asyncio.to_thread(_read_image, uri, self.storage)
        return bool(missing)

    def of(self, task: Task) -> str:
        """The image of a task; empty if it needs none, or is not known yet."""
        return self._known.get(task.uri, "")

    def planned(self, tasks: Sequence[Task]) -> Iterator[plan_pb2.PlannedImage]:
        """Images of the tasks that are known, each once, with the environment as template."""
        pairs = ((task.environment, self.of(task)) for task in tasks)
        for environment, image in dict.fromkeys(pairs):
            if image:
                yield plan_pb2.PlannedImage(template=environment, image=image)


def _read_image(uri: str, storage: StoreAccess) -> str:
    try:
        settings = task_file.parse_task_file(open_run_store(uri, storage).get(TASK_FILE).decode())
    except (StoreError, CorruptError, UserError, ValueError) as error:
        # Its group says so when it begins.
        log.debug("image of %s is not known ahead: %s", uri, error)
        return ""
    image = settings.metadata.etude_image or ""
    return image if is_pinned(image) else ""
