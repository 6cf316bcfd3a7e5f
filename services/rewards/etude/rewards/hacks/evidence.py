"""Evidence that the signs of a hack are sought in: commands, changed files, accesses, text."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from google.protobuf.message import DecodeError

from etude.v1 import environments_pb2, rollout_pb2

_MAX_CHARS = 1 << 20
TEST_PATH = re.compile(
    r"(?:^|/)(?:tests?|__tests__|__snapshots__|testdata)/|(?:^|/)(?:test_[^/]*|[^/]*_test)\.\w+$"
    r"|\.(?:test|spec)\.\w+$|(?:^|/)conftest\.py$"
)
RUNNER_PATH = re.compile(
    r"(?:^|/)(?:conftest\.py|\.?pytest\.(?:ini|toml)|tox\.ini|setup\.(?:cfg|py)|noxfile\.py"
    r"|sitecustomize\.py|usercustomize\.py|[^/]+\.pth|(?:GNUm|m|M)akefile|package\.json"
    r"|jest\.config\.\w+)$|\.(?:egg|dist)-info/"
)
_CACHE_PATH = re.compile(r"(?:^|/)(?:__pycache__|\.\w+_cache)/|\.py[co]$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Facts of one rollout."""

    commands: str
    """Arguments of its calls, decoded, a line each."""
    written: Mapping[str, str]
    """Text of changed files by path."""
    deleted: tuple[str, ...]
    read: tuple[str, ...]
    """Paths that the environment saw opened."""
    touched: tuple[str, ...]
    """Paths that the environment saw written or deleted, outside of the workspace too."""
    originals: Mapping[str, str]
    """Text of the task's first files by path."""
    record: rollout_pb2.Rollout
    text: str = field(default="")
    """What the policy said or thought; empty where it is left out."""

    @classmethod
    def from_rollout(
        cls,
        rollout: rollout_pb2.Rollout,
        originals: Mapping[str, bytes],
        *,
        reads_text: bool,
    ) -> Self:
        """The evidence of a rollout; a diff that cannot be read has none."""
        diff = environments_pb2.WorkspaceDiff()
        try:
            diff.MergeFromString(rollout.diff)
        except DecodeError:
            diff = environments_pb2.WorkspaceDiff()
        kinds = environments_pb2.AccessKind
        changed = {kinds.ACCESS_KIND_WRITTEN, kinds.ACCESS_KIND_DELETED}
        return cls(
            commands="\n".join(_arguments(call) for call in rollout.calls)[:_MAX_CHARS],
            written={each.path: _text(each.content) for each in diff.written},
            deleted=tuple(diff.deleted),
            read=tuple(e.path for e in diff.accesses if e.kind == kinds.ACCESS_KIND_READ),
            touched=tuple(e.path for e in diff.accesses if e.kind in changed),
            originals={path: _text(content) for path, content in originals.items()},
            record=rollout,
            text=rollout.final_message[:_MAX_CHARS] if reads_text else "",
        )

    @property
    def changed(self) -> tuple[str, ...]:
        """Paths of the change, without caches."""
        paths = (*self.written, *self.deleted)
        return tuple(path for path in paths if not _CACHE_PATH.search(path))

    @property
    def added(self) -> Mapping[str, str]:
        """Lines of each changed file that its first version did not have."""
        return {
            path: "\n".join(
                line
                for line in text.splitlines()
                if line not in self.originals.get(path, "").splitlines()
            )
            for path, text in self.written.items()
        }


def _arguments(call: rollout_pb2.CallRecord) -> str:
    try:
        decoded = json.loads(call.arguments_json)
    except (ValueError, RecursionError):
        return call.arguments_json
    return "\n".join(map(str, decoded.values())) if isinstance(decoded, dict) else str(decoded)


def _text(content: bytes) -> str:
    return content[:_MAX_CHARS].decode("utf-8", "replace")
