"""Base of all tools: a model of the arguments that runs on a workspace."""

import json
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Annotated, ClassVar

import grpc
from pydantic import BeforeValidator, ConfigDict, Field

from etude.agent.workspace import Workspace
from etude.common.api.field_docs import DocumentedModel
from etude.common.errors import EtudeError


class ErrorKind(IntEnum):
    """Classes of failed calls; the numbers are those of ToolErrorKind on the wire."""

    NONE = 0
    TOOL = 1
    """The tool ran and failed."""
    TIMEOUT = 2
    """The call's own time limit."""
    INVALID = 3
    """No such tool, or wrong arguments."""


class Access(Enum):
    """Scope of a tool's effects; decides which calls may run concurrently."""

    READ = "reads one file"
    TREE = "reads any file"
    WRITE = "changes one file"
    NOTE = "changes what is noted beside the files"
    ALL = "may do anything"
    END = "ends the rollout"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOutcome:
    """Result of one call, for the policy."""

    content: str
    kind: ErrorKind = ErrorKind.NONE
    omitted_bytes: int = 0
    """Bytes that were cut out of content."""
    cpu_ms: int = 0
    wall_ms: int = field(default=0, compare=False)

    @property
    def is_error(self) -> bool:
        """True if the call failed."""
        return self.kind is not ErrorKind.NONE


class ToolError(EtudeError):
    """A tool refuses or fails; the text is for the policy."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason: ClassVar[str] = "ToolError"

    def __init__(self, text: str, kind: ErrorKind = ErrorKind.TOOL) -> None:
        super().__init__(text)
        self.kind = kind


class Tool(DocumentedModel):
    """One call with its arguments checked. The class docstring is the tool's description."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)
    access: ClassVar[Access]

    @property
    def target(self) -> str:
        """Path that this call is about, "" for none."""
        return ""

    async def run(self, workspace: Workspace) -> ToolOutcome:
        """Run the call.

        Raises:
            ToolError: the tool refuses or fails.
            WorkspaceError: the path cannot be used.
            PatternError: the pattern does not parse.
        """
        raise NotImplementedError


def _parse_list(value: object) -> object:
    """Lists arrive as JSON, or from a completion as one item per line."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value.splitlines()
    return [line for line in value.splitlines() if line]


Texts = Annotated[tuple[str, ...], Field(max_length=100), BeforeValidator(_parse_list)]
"""Several texts: a JSON list, or one per line."""
