"""Git repositories in the layers of an image, copied so that git may look at them.

Covered: settings, hooks and links of a repository are never used; objects are kept from every
layer, also those that a later one removes. Not covered: git itself reads objects that are not
trusted, as the user who runs the audit.
"""

import contextlib
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from etude.envserver.tasks import leak_probe
from etude.envserver.tasks.layers import DamagedLayerError, LayerEntry, LayerMarks

_FOLDER = re.compile(r"(?:^|/)[^/]*\.git(?=/)")
_PART = re.compile(
    r"(?:HEAD|config|packed-refs|shallow|info/grafts|objects/info/(?:http-)?alternates"
    r"|(?:refs|logs)/.+|objects/(?:[0-9a-f]{2}|pack)/[^/]+)$"
)
"""What is copied of a repository, or of one for a submodule in it."""
_OBJECT = re.compile(r"(?:^|/)objects/(?:[0-9a-f]{2}|pack)/[^/]+$")
_MAX_BYTES = 16 << 30
_CHUNK_BYTES = 1 << 20
_SHA256 = re.compile(r"^\s*objectformat\s*=\s*sha256\s*$", re.IGNORECASE | re.MULTILINE)
_REMOTE = re.compile(r"^\s*url\s*=\s*(\S.*)$", re.IGNORECASE | re.MULTILINE)
_CONFIG = "[core]\n\trepositoryformatversion = 1\n\tbare = true\n[gc]\n\tauto = 0\n"


class LayerRepository(NamedTuple):
    """A repository that was copied."""

    folder: Path
    """The copy, with settings of the audit."""
    where: str
    """Layers and path in the image."""
    leaks: tuple[tuple[str, str], ...]
    """Rule and fault of what its settings give away."""


@dataclass(slots=True, kw_only=True)
class RepositoryCopies:
    """Copies of the repositories of one image, in a folder that is empty at first."""

    folder: Path
    _layers: dict[str, set[str]] = field(default_factory=dict)
    """Numbers of the layers that a folder named .git has parts in."""
    _numbers: dict[str, str] = field(default_factory=dict)
    """Layer of each copied file but objects."""
    _num_bytes: int = 0

    def add(self, entry: LayerEntry) -> bool:
        """Copy a file of a layer, if it is part of a repository; returns true if it is.

        Raises:
            DamagedLayerError: the repositories are larger than an audit may copy.
        """
        found = _FOLDER.search(entry.path)
        if found is None or entry.file is None:
            return False
        part = entry.path[found.end() + 1 :]
        if not _PART.search(part):
            return True  # hooks and the like
        self._num_bytes += entry.size
        if self._num_bytes > _MAX_BYTES:
            raise DamagedLayerError(entry.layer, f"has repositories of more than {_MAX_BYTES} B")
        target = self.folder / entry.path
        self._make_room(target)
        with target.open("wb") as copy:
            shutil.copyfileobj(entry.file, copy, _CHUNK_BYTES)
        self._layers.setdefault(entry.path[: found.end()], set()).add(entry.layer)
        if not _OBJECT.search(entry.path):
            self._numbers[entry.path] = entry.layer
        return True

    def remove(self, marks: LayerMarks) -> None:
        """Remove what a layer removes of those below it: all but objects."""
        for path, layer in list(self._numbers.items()):
            if marks.covers(path, layer):
                del self._numbers[path]
                place = self.folder / path
                if place.is_file():  # the layer may have a folder there
                    place.unlink()

    def _make_room(self, target: Path) -> None:
        """Make the folder of a file; what another layer had as a file there is replaced."""
        for parent in reversed(target.relative_to(self.folder).parents):
            place = self.folder / parent
            if place.is_file():
                place.unlink()
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir():
            shutil.rmtree(target)

    def repositories(self) -> Iterator[LayerRepository]:
        """Every repository that git could read in the image, with settings of the audit."""
        for folder in list(leak_probe.repositories(self.folder)):
            path = folder.relative_to(self.folder).as_posix()
            config = folder / "config"
            settings = config.read_text(errors="replace") if config.is_file() else ""
            own = _CONFIG
            if _SHA256.search(settings):
                own += "[extensions]\n\tobjectFormat = sha256\n"
            if config.is_dir():
                shutil.rmtree(config)
            config.write_text(own)
            found = _FOLDER.search(f"{path}/")
            layers = self._layers.get(path[: found.end()] if found else path, set())
            where = f"{_name_layers(layers)}: /{path}"
            leaks = [("remotes", f"has a remote: {url}") for url in _REMOTE.findall(settings)]
            for name in ("objects/info/alternates", "objects/info/http-alternates"):
                if (folder / name).is_file():
                    (folder / name).unlink()  # it may name any folder of this machine
                    leaks.append(("stray-objects", f"{name} leads to objects from elsewhere"))
            yield LayerRepository(folder, where, tuple(leaks))

    def close(self) -> None:
        """Remove the copies."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.folder)


def _name_layers(layers: set[str]) -> str:
    """The layers for people; all of them, as an object may be in any."""
    return ", ".join(sorted(layers, key=_number))


def _number(layer: str) -> int:
    return int(layer.split()[1])
