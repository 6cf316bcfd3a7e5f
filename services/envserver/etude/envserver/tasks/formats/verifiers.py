"""Rows of a verifiers taskset as task folders: https://pypi.org/project/verifiers/0.4.0/.

A row is the JSON of one task's data, or a trace with one in it. How a taskset rewards is code of
its package and stays there: either the row names a Harbor folder, which is taken whole, or the user
gives one tests/ folder for all rows, which finds the row next to itself as row.json.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from etude.common.harbor import task as folders
from etude.common.harbor.task_file import WORKSPACE
from etude.envserver.storage.trees import File
from etude.envserver.tasks.formats import harbor, toml
from etude.envserver.tasks.formats.imported_task import ImportedTask, ImportRefusedError

MAX_ROW_BYTES = 16 << 20
TIMEOUT_S = 600.0


class _Timeout(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow")

    scoring: float | None = Field(default=None, gt=0, le=86_400, allow_inf_nan=False)


class VerifiersRow(BaseModel):
    """The data of one task; what the taskset added to it is for its tests."""

    model_config = ConfigDict(frozen=True, extra="allow")

    idx: int | None = Field(default=None, ge=0)
    id: str | None = None
    name: str | None = None
    prompt: str | list[dict[str, JsonValue]] | None = None
    system_prompt: str | None = None
    image: str | None = None
    workdir: str | None = None
    agent_user: None = None
    skills: list[JsonValue] = Field(default=[], max_length=0)
    artifacts: list[JsonValue] = Field(default=[], max_length=0)
    timeout: _Timeout = _Timeout()
    task_dir: str = ""
    """Of rows of the package's own Harbor taskset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiersOptions:
    """Settings of an import that rows do not contain."""

    images: harbor.ImageChoice
    """Images of rows that name a Harbor task."""
    tests: Path | None = None
    environment: Path | None = None
    image: str = ""


def import_row(number: int, text: bytes, options: VerifiersOptions) -> ImportedTask:
    """The task of a row.

    Args:
        number: of the row, for those that have no id.
        text: one line of JSON.
        options: of the import.

    Raises:
        ImportRefusedError: nothing says how it is rewarded.
        UserError: naming the field that cannot be taken.
    """
    found = _object(text)
    row = _row(found)
    if options.tests is None:
        if not row.task_dir:
            fix = "give one folder of tests for all rows: --tests FOLDER"
            raise ImportRefusedError("row", "is rewarded by code of its package", fix)
        return harbor.import_task(Path(row.task_dir), options.images)
    files = {"instruction.md": File(_instruction(row).encode() + b"\n")}
    for part, folder in (("tests", options.tests), ("environment", options.environment)):
        read = folders.read_files(folder) if folder is not None else {}
        files |= {f"{part}/{path}": File(data) for path, data in read.items()}
    files["tests/row.json"] = File(json.dumps(found, indent=1).encode() + b"\n")
    files["task.toml"] = File(_settings(row, options).encode())
    return ImportedTask(_task_id(row, number), files, tuple(_notes(row, options)))


def _object(text: bytes) -> dict[str, Any]:
    if len(text) > MAX_ROW_BYTES:
        raise ImportRefusedError("row", f"is longer than {MAX_ROW_BYTES} bytes")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as cause:
        raise ImportRefusedError("row", f"is no JSON: {cause}") from cause
    match found:
        case {"nodes": list(), "task": {"data": dict(data)}} | dict(data):
            return data
        case _:
            raise ImportRefusedError("row", "is no object")


def _row(found: Mapping[str, Any]) -> VerifiersRow:
    try:
        return VerifiersRow.model_validate(found)
    except ValidationError as cause:
        first = cause.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ImportRefusedError(where, first["msg"].removeprefix("Value error, ")) from cause


def _task_id(row: VerifiersRow, number: int) -> str:
    given = row.id or row.name or f"task-{row.idx if row.idx is not None else number}"
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", given).strip("-._")[:128]
    return name or f"task-{number}"


def _instruction(row: VerifiersRow) -> str:
    prompt = (
        [row.prompt]
        if isinstance(row.prompt, str)
        else [_message_text(m) for m in row.prompt or []]
    )
    parts = [row.system_prompt or "", *prompt]
    text = "\n\n".join(part.strip() for part in parts if part.strip())
    if not text:
        raise ImportRefusedError("prompt", "is empty")
    try:
        text.encode()
    except UnicodeEncodeError as cause:
        raise ImportRefusedError("prompt", "holds half a character") from cause
    return text


def _message_text(message: Mapping[str, JsonValue]) -> str:
    if message.get("role") not in {"system", "user"}:
        raise ImportRefusedError("prompt", "begins in the middle of a conversation")
    match message.get("content"):
        case str(text):
            return text
        case list(parts):
            texts = [
                p.get("text") for p in parts if isinstance(p, dict) and p.get("type") == "text"
            ]
            if len(texts) == len(parts) and all(isinstance(text, str) for text in texts):
                return "\n".join(str(text) for text in texts)
        case _:
            pass
    raise ImportRefusedError("prompt", "holds more than text")


def _settings(row: VerifiersRow, options: VerifiersOptions) -> str:
    metadata = {"etude_image": options.image} if options.image else {}
    return toml.write_toml(
        {
            "schema_version": "1.4",
            "source": "verifiers",
            "metadata": metadata,
            "verifier": {"timeout_sec": row.timeout.scoring or TIMEOUT_S},
            "environment": {"network_mode": "no-network"},
        }
    )


def _notes(row: VerifiersRow, options: VerifiersOptions) -> Iterator[str]:
    if row.image and not options.image:
        yield f"image {row.image!r} is not pulled; name one that is here with --image"
    if row.workdir not in {None, WORKSPACE}:
        yield f"its folder {row.workdir!r} is {WORKSPACE} here"
    yield "it has no solution, so nothing proves it"
