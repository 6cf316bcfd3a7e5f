"""Audit of the images that tasks name by digest: every layer is read, and nothing is run.

An image gives a task away by a hidden test or the solution in any of its layers, removed by a later
one or not, and by commits that are no ancestors of the one that is checked out.
"""

import contextlib
import hashlib
import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import IO, Self

from etude.common.errors import EtudeError, UserError
from etude.common.harbor import task as harbor_task
from etude.common.harbor.task import HarborTask
from etude.common.pinned_images import PinnedImage, is_pinned, parse_pinned
from etude.envserver.images.pull import image_layout
from etude.envserver.images.pull.bounded_program import FillLimits
from etude.envserver.images.pull.registry_access import NO_ACCESS, RegistryAccess
from etude.envserver.storage.store_reads import DirectReads, StoreReads
from etude.envserver.tasks import hidden_content, layers
from etude.envserver.tasks.layer_repositories import RepositoryCopies
from etude.envserver.tasks.layers import LayerMarks
from etude.envserver.tasks.leak_probe import LeakProbe

_MAX_TEXT_BYTES = 8 << 20
"""Larger files are compared as a whole only."""
_MAX_WORKSPACE_BYTES = 256 << 20
_BINARY_BYTES = 8_000
"""Git takes a file with a zero byte in so many as no text."""
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLeak:
    """Something in an image that gives a task away."""

    where: str
    """Layer and path."""
    what: str


@dataclass(slots=True, kw_only=True)
class ImageAuditor:
    """Fetches images and looks into them, each once for all of its tasks."""

    registries: RegistryAccess = NO_ACCESS
    reads: StoreReads = field(default_factory=DirectReads)
    """Of OCI layouts in an object store."""

    def audit(self, image: PinnedImage, tasks: Sequence[HarborTask]) -> list[list[ImageLeak]]:
        """Leaks of each task, in order; an image that cannot be read is one of every task."""
        try:
            with TemporaryDirectory(prefix="etude-audit-") as scratch:
                folder = Path(scratch)
                layout = image_layout.fetch_layout(
                    image,
                    folder,
                    registries=self.registries,
                    reads=self.reads,
                    limits=FillLimits(),
                )
                return audit_layout(layout, tasks, folder / "repositories")
        except UserError as error:
            unreadable = ImageLeak(where=str(image), what=f"cannot be looked at: {error}")
            return [[unreadable] for _ in tasks]


@dataclass(slots=True)
class TaskImageLeaks:
    """Leaks of the images of a task set; each image is looked into when its first task is due."""

    auditor: ImageAuditor
    folders: Mapping[str, Sequence[Path]]
    """Task folders by image."""
    _found: dict[Path, list[ImageLeak]] = field(default_factory=dict)

    @classmethod
    def of_tasks(cls, auditor: ImageAuditor, folders: Sequence[Path]) -> Self:
        """Find the image of each task; one that cannot be read has none."""
        found = dict[str, list[Path]]()
        for folder in folders:
            with contextlib.suppress(EtudeError):
                image = harbor_task.read_task(folder).image
                if is_pinned(image):
                    found.setdefault(image, []).append(folder)
        return cls(auditor, found)

    def take(self, task: HarborTask) -> list[ImageLeak]:
        """The leaks of a task; each is taken once."""
        if task.folder not in self._found and task.image in self.folders:
            tasks = [harbor_task.read_task(each) for each in self.folders[task.image]]
            leaks = self.auditor.audit(parse_pinned(task.image), tasks)
            self._found |= dict(zip((each.folder for each in tasks), leaks, strict=True))
        return self._found.pop(task.folder, [])


def audit_layout(layout: Path, tasks: Sequence[HarborTask], scratch: Path) -> list[list[ImageLeak]]:
    """Leaks of each task in the image of a fetched layout.

    Args:
        layout: of one image.
        tasks: that have it.
        scratch: folder to make for copies of repositories.

    Raises:
        UserError: a layer is damaged, or exceeds a limit.
    """
    scratch.mkdir()
    hidden = [_HiddenFiles(task.tests(), task.solution()) for task in tasks]
    root = image_layout.image_config(layout).get("WorkingDir") or "/"
    with contextlib.closing(RepositoryCopies(folder=scratch)) as copies:
        workspace = _Workspace(folder=str(root), hidden=hidden)
        marks = LayerMarks()
        for entry in layers.read_layers(layout):
            if entry.layer != marks.layer:
                _remove_marked(marks, workspace, copies)
                marks = LayerMarks(entry.layer)
            with layers.refuse_damage(entry.layer):
                if entry.file is None:
                    marks.paths.add(entry.path)
                elif not copies.add(entry):
                    workspace.add(entry)
        _remove_marked(marks, workspace, copies)
        probes = [
            _probe(task, each, workspace.files()) for task, each in zip(tasks, hidden, strict=True)
        ]
        _compare_files(layout, probes)
        for repository in copies.repositories():
            for probe in probes:
                for rule, what in repository.leaks:
                    probe.add(rule, repository.where, what)
                probe.repository(repository.folder, repository.where)
    return [
        [
            ImageLeak(where=found["where"], what=f"{found['rule']}: {found['what']}")
            for found in probe.findings
        ]
        for probe in probes
    ]


def _remove_marked(marks: LayerMarks, workspace: "_Workspace", copies: RepositoryCopies) -> None:
    """Remove what a layer removes; once for all of its marks, as there may be a million."""
    if marks.paths:
        workspace.remove(marks)
        copies.remove(marks)


def _compare_files(layout: Path, probes: Sequence[LeakProbe]) -> None:
    """Compare every file of every layer with what has to stay hidden."""
    for entry in layers.read_layers(layout):
        if entry.file is not None:
            with layers.refuse_damage(entry.layer):
                _compare_file(entry, entry.file, probes)


def _compare_file(entry: layers.LayerEntry, file: IO[bytes], probes: Sequence[LeakProbe]) -> None:
    where = f"{entry.layer}: /{entry.path}"
    if entry.size > _MAX_TEXT_BYTES:
        hasher = hashlib.sha256()
        while chunk := file.read(_CHUNK_BYTES):
            hasher.update(chunk)
        for probe in probes:
            probe.compare_digest(where, hasher.hexdigest())
        return
    data = file.read()
    for probe in probes:
        if b"\0" in data[:_BINARY_BYTES]:
            probe.compare_digest(where, hashlib.sha256(data).hexdigest())
        else:
            probe.content(where, data)


@dataclass(frozen=True, slots=True)
class _HiddenFiles:
    """Hidden files of a task, with what the files are called that they were written against."""

    tests: Mapping[str, bytes]
    solution: Mapping[str, bytes]

    def names(self) -> set[str]:
        """Names of files that hidden ones replace or mention."""
        names = {PurePosixPath(path).name for path in (*self.tests, *self.solution)}
        for data in (*self.tests.values(), *self.solution.values()):
            text = data.decode(errors="replace")
            names.update(posixpath.basename(word) for word in re.findall(r"[\w./+-]+", text))
        return names


@dataclass(slots=True, kw_only=True)
class _Workspace:
    """Files of the working folder that hidden ones were written against, as the agent sees them."""

    folder: str
    hidden: Sequence[_HiddenFiles]
    _found: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    """Layer and content by path."""
    _names: set[str] = field(default_factory=set)
    _num_bytes: int = 0

    def __post_init__(self) -> None:
        self.folder = posixpath.normpath(f"/{self.folder}").lstrip("/")
        self._names = {name for each in self.hidden for name in each.names()}

    def add(self, entry: layers.LayerEntry) -> None:
        """Keep a file, if a hidden one may have been written against it."""
        is_inside = not self.folder or entry.path.startswith(f"{self.folder}/")
        is_small = entry.size <= min(_MAX_TEXT_BYTES, _MAX_WORKSPACE_BYTES - self._num_bytes)
        is_named = posixpath.basename(entry.path) in self._names
        if entry.file is not None and is_inside and is_small and is_named:
            self._num_bytes += entry.size
            self._found[entry.path] = (entry.layer, entry.file.read())

    def remove(self, marks: LayerMarks) -> None:
        """Remove what a layer removes of those below it."""
        for path, (layer, _) in list(self._found.items()):
            if marks.covers(path, layer):
                del self._found[path]

    def files(self) -> dict[str, bytes]:
        """Files by path below the working folder."""
        prefix = f"{self.folder}/" if self.folder else ""
        return {path.removeprefix(prefix): data for path, (_, data) in self._found.items()}


def _probe(task: HarborTask, hidden: _HiddenFiles, workspace: Mapping[str, bytes]) -> LeakProbe:
    hashes = hidden_content.hidden_hashes(hidden.tests, hidden.solution)
    units = hidden_content.hidden_units(workspace, hidden.tests, hidden.solution)
    return LeakProbe(
        {
            "hashes": hashes,
            "units": [{**asdict(unit), "needed": unit.needed} for unit in units],
            "keeps_history": task.keeps_history,
        }
    )
