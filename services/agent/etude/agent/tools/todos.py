"""Tool todo_write: the policy's own list of todos, kept outside the workspace."""

import json
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter
from typing_extensions import override

from etude.agent.tools.base import Access, Tool, ToolError, ToolOutcome
from etude.agent.workspace import Workspace
from etude.common.api.field_docs import DocumentedModel

MAX_TODOS = 100
_NOTE = "todos"


class TodoStatus(StrEnum):
    """Progress of a todo."""

    PENDING = "pending"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    CANCELLED = "cancelled"


_MARKS = {
    TodoStatus.PENDING: "[ ]",
    TodoStatus.IN_PROGRESS: "[>]",
    TodoStatus.COMPLETED: "[x]",
    TodoStatus.CANCELLED: "[-]",
}


class Todo(DocumentedModel):
    """One thing to do."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str = Field(min_length=1, max_length=64, pattern=r"^[^\x00-\x1f\x7f]+$")
    """Its name in this list."""
    content: str = Field(default="", max_length=1000)
    """What is to be done; with merge, unset keeps what it was."""
    status: TodoStatus = TodoStatus.PENDING
    """How far it is; with merge, unset keeps what it was."""

    def merge_into(self, former: "Todo") -> "Todo":
        """The former todo with the fields that are set here."""
        return former.model_copy(
            update={name: getattr(self, name) for name in self.model_fields_set}
        )


_TODOS = TypeAdapter(tuple[Todo, ...])


def _parse_todos(value: object) -> object:
    """Parse the list, which a completion gives as JSON text.

    Raises:
        ValueError: it is not JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError("is no JSON list") from error


class TodoWrite(Tool):
    """Write down what is to be done and how far it is; the result is the whole list."""

    access: ClassVar[Access] = Access.NOTE
    todos: Annotated[tuple[Todo, ...], Field(max_length=MAX_TODOS), BeforeValidator(_parse_todos)]
    """The list, or with merge its changes, as JSON."""
    merge: bool = False
    """Change and add by id, and keep the others, instead of replacing the list."""

    @property
    @override
    def target(self) -> str:
        return _NOTE

    @override
    async def run(self, workspace: Workspace) -> ToolOutcome:
        former: Sequence[Todo] = ()
        raw = workspace.notes.get(_NOTE)
        if raw is not None and self.merge:
            former = _TODOS.validate_json(raw)
        todos = _merge_todos(former, self.todos)
        workspace.notes.store(_NOTE, _TODOS.dump_json(tuple(todos)))
        return ToolOutcome(content=_render_todos(todos))


def _merge_todos(former: Sequence[Todo], changes: Sequence[Todo]) -> list[Todo]:
    by_id = {todo.id: todo for todo in former}
    seen: set[str] = set()
    for todo in changes:
        if todo.id in seen:
            raise ToolError(f"todo {todo.id!r} is given twice")
        seen.add(todo.id)
        by_id[todo.id] = todo.merge_into(by_id[todo.id]) if todo.id in by_id else todo
        if not by_id[todo.id].content.strip():
            raise ToolError(f"todo {todo.id!r} has no content")
    if len(by_id) > MAX_TODOS:
        raise ToolError(f"{len(by_id)} todos; the list takes {MAX_TODOS}")
    return list(by_id.values())


def _render_todos(todos: Sequence[Todo]) -> str:
    if not todos:
        return "The list is empty."
    done = sum(todo.status in {TodoStatus.COMPLETED, TodoStatus.CANCELLED} for todo in todos)
    rows = [f"{_MARKS[todo.status]} {todo.id}: {' '.join(todo.content.split())}" for todo in todos]
    return "\n".join([f"{len(todos)} todos, {len(todos) - done} open:", *rows])
