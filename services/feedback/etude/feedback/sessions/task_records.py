"""Records of the tasks that sessions became, by user: an erasure finds them.

tasks/<tenant>/<user>/<task>.json        created before the task's folder
"""

import contextlib
import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

from pydantic import BaseModel

from etude.common.blobs import Store
from etude.common.weights.protocol import records
from etude.feedback.ledger.user_keys import UserId

TASKS = "tasks/"
_KEY = re.compile(
    re.escape(TASKS) + r"((?:[0-9a-f]{2})+)/([0-9a-f]{32})/(session-[0-9a-f]{16})\.json"
)


class TaskRecord(BaseModel):
    """One task that was made of a session."""

    model_config = records.STRICT

    format: Literal[1] = 1
    session: str
    started_ms: int
    """Start of the session."""
    terms: str
    """Version of the terms that its user had agreed to."""


class RecordedTask(NamedTuple):
    """A task, and the user whose session it was."""

    user: UserId
    task_id: str


def record_task(store: Store, user: UserId, task_id: str, record: TaskRecord) -> None:
    """Record a task; the first record of a task stays.

    Raises:
        StoreError: the store did not answer; call again.
    """
    records.create_once(store, f"{_prefix(user)}{task_id}.json", records.to_bytes(record))


def list_tasks(store: Store, user: UserId | None = None) -> Iterator[RecordedTask]:
    """List the tasks of a user, or of all."""
    for info in store.list(TASKS if user is None else _prefix(user)):
        found = _KEY.fullmatch(info.key)
        with contextlib.suppress(UnicodeDecodeError):  # an object of others
            if found is not None:
                tenant = bytes.fromhex(found[1]).decode()
                yield RecordedTask(UserId(tenant, found[2]), found[3])


def read_record(store: Store, task: RecordedTask) -> TaskRecord:
    """Read the record of a task.

    Raises:
        CorruptError: it is damaged.
        MissingError: there is none.
        StoreError: the store did not answer.
    """
    key = f"{_prefix(task.user)}{task.task_id}.json"
    return records.parse(TaskRecord, records.fetch(store, key), where=f"{store.url}/{key}")


def _prefix(user: UserId) -> str:
    return f"{TASKS}{user.tenant.encode().hex()}/{user.digest}/"
