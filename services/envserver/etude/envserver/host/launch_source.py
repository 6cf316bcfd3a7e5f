"""Validation of launch orders, and what their environments start from: files or a snapshot."""

import contextlib
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from etude.agent.toolsets import toolset
from etude.common.errors import CorruptError, EtudeError, InvalidFieldError, UnknownIdError
from etude.envserver import metrics
from etude.envserver.drivers.base import Driver, SandboxError
from etude.envserver.host.snapshots.environment_state import EnvironmentStates
from etude.envserver.host.snapshots.snapshot_record import LocalSnapshot
from etude.envserver.host.task_images import TaskImages, require_images
from etude.envserver.host.workspace_sources import WorkspaceSource, WorkspaceSources
from etude.v1 import environments_pb2

RESERVE_BYTES = 256 << 20
"""No environment is opened while the disk has less than this free."""
_ON_EXPIRY = frozenset(
    {
        environments_pb2.ON_EXPIRY_UNSPECIFIED,
        environments_pb2.ON_EXPIRY_KILL,
        environments_pb2.ON_EXPIRY_PAUSE,
    }
)


class WeakIsolationError(EtudeError):
    """The template is not trusted enough for this driver."""

    reason = "WeakIsolation"


class LaunchSource(NamedTuple):
    """Template, first files, and the snapshot that replaces these if there is one."""

    template: str
    """Driver's name."""
    source: WorkspaceSource
    snapshot: LocalSnapshot | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSources:
    """Validates launch orders and finds their sources."""

    driver: Driver
    sources: WorkspaceSources
    states: EnvironmentStates
    images: TaskImages | None
    templates: Collection[str]
    refused: Mapping[str, str]

    async def resolve(self, request: environments_pb2.OpenEnvironmentsRequest) -> LaunchSource:
        """Validate an order and find its source.

        Raises:
            CorruptError: its first files are no longer what a snapshot was made from.
            EtudeError: the environments cannot be opened for another reason.
        """
        self._check(request)
        task = None
        if request.image:
            task = require_images(self.images).find(request.template, request.image)
        template = request.template if task is None else task.name
        self.driver.check_startable(template)
        snapshot = self._snapshot(request, template)
        uri = request.workspace.uri if snapshot is None else snapshot.origin.uri
        # The caller keeps the image from here on: nothing runs between this end and its beginning.
        with contextlib.nullcontext() if self.images is None else self.images.opening(template):
            source = await self.sources.get(uri, task)
        if snapshot is None:
            return LaunchSource(template, source, None)
        if source.key != snapshot.origin.source_key:
            raise CorruptError(f"{source.uri} is no longer what the snapshot's lease started from")
        return LaunchSource(template, source, snapshot)

    def _check(self, request: environments_pb2.OpenEnvironmentsRequest) -> None:
        if request.template in self.refused:
            raise WeakIsolationError(self.refused[request.template])
        if request.template not in self.templates:
            raise UnknownIdError(f"this pool has no template {request.template!r}")
        toolset(request.toolset)
        if request.on_expiry not in _ON_EXPIRY:
            raise InvalidFieldError("on_expiry", f"{request.on_expiry} is not a known value")
        if request.on_expiry == environments_pb2.ON_EXPIRY_PAUSE:
            self.states.require_files("a lease that expires cannot be paused")
        free = _free_bytes(self.driver.leases)
        metrics.free_bytes.set(free)
        if free < RESERVE_BYTES:
            raise SandboxError(
                f"{self.driver.leases} has {free >> 20} MiB left, less than {RESERVE_BYTES >> 20}:"
                " free some space or give the host a larger scratch volume"
            )

    def _snapshot(
        self, request: environments_pb2.OpenEnvironmentsRequest, template: str
    ) -> LocalSnapshot | None:
        """Find the snapshot that replaces the first files.

        Raises:
            UnknownIdError: their run has no such snapshot here.
            InvalidFieldError: it is of another template or workspace.
        """
        if not request.snapshot_id:
            return None
        found = None
        for run_id in {held.run_id for held in request.leases}:
            found = self.states.snapshots.find(run_id, request.snapshot_id)
        if found is None:
            return None
        for field_name, asked, was in (
            ("template", template, found.origin.template),
            ("workspace.uri", request.workspace.uri or found.origin.uri, found.origin.uri),
        ):
            if asked != was:
                raise InvalidFieldError(field_name, f"the snapshot is of {was!r}, not {asked!r}")
        return found


def _free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
