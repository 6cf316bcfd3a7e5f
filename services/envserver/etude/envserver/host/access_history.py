"""History of the accesses of one lease's commands, in bounded memory."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from etude.envserver.drivers.accesses import Access, AccessKind
from etude.envserver.drivers.base import CommandOutcome
from etude.v1 import environments_pb2

MAX_ACCESSES = 256
_KINDS: Mapping[AccessKind, environments_pb2.AccessKind] = MappingProxyType(
    {
        AccessKind.READ: environments_pb2.ACCESS_KIND_READ,
        AccessKind.WRITTEN: environments_pb2.ACCESS_KIND_WRITTEN,
        AccessKind.DELETED: environments_pb2.ACCESS_KIND_DELETED,
        AccessKind.STARTED: environments_pb2.ACCESS_KIND_STARTED,
    }
)


@dataclass(slots=True)
class AccessHistory:
    """Accesses of all commands so far, each once; lost with this process."""

    is_complete: bool = True
    _accesses: dict[Access, None] = field(default_factory=dict)

    def add(self, outcome: CommandOutcome) -> CommandOutcome:
        """Add the accesses of a command; returns its outcome."""
        self.is_complete = self.is_complete and outcome.accesses.is_complete
        for access in outcome.accesses.accesses:
            if access in self._accesses:
                continue
            if len(self._accesses) >= MAX_ACCESSES:
                self.is_complete = False
                break
            self._accesses[access] = None
        return outcome

    def write(self, diff: environments_pb2.WorkspaceDiff) -> None:
        """Write the history into a diff."""
        diff.accesses_incomplete = not self.is_complete
        for access in self._accesses:
            diff.accesses.add(kind=_KINDS[access.kind], path=access.path)
