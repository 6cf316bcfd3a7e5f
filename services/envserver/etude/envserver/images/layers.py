"""Root file systems as overlay layers, each cached at the address of its inputs."""

import dataclasses
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from etude.common.errors import UserError
from etude.envserver.images import host_programs
from etude.envserver.images.build_cache import BuildCache
from etude.envserver.images.setup_step import PlacedFile, SetupJob
from etude.envserver.images.spec import SetupStep, digest

_FILES_LIMIT_S, _PACK_LIMIT_S = 120.0, 1_800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RootFilesystem:
    """A root file system in the cache."""

    cache: BuildCache
    address: str
    """Digest of its inputs."""
    layers: tuple[str, ...]
    """Folders relative to the cache's, the topmost first."""

    def with_files(self, files: Sequence[PlacedFile]) -> "RootFilesystem":
        """Add files of the host."""
        if not files:
            return self
        made_of = [[file.path, file.mode, _sha256(Path(file.source))] for file in files]

        def make(folder: Path) -> SetupJob:
            return dataclasses.replace(self._job(folder), files=tuple(files))

        address = digest(self.address, "files", made_of)
        return self._layer(address, make, _JobDescription("files", _FILES_LIMIT_S))

    def with_step(self, step: SetupStep) -> "RootFilesystem":
        """Run a setup command.

        Raises:
            UserError: the command failed, or took longer than it may.
        """

        def make(folder: Path) -> SetupJob:
            return dataclasses.replace(self._job(folder), script=step.run, network=step.network)

        how = _JobDescription(f"setup: {step.run[:200]}", float(step.timeout_seconds))
        return self._layer(self._address(step), make, how)

    def is_kept(self, step: SetupStep) -> bool:
        """True if `with_step` finds its result in the cache."""
        return self.cache.find("layers", self._address(step)) is not None

    def _address(self, step: SetupStep) -> str:
        return digest(self.address, "step", step.run, step.network)

    def pack(self, target: Path) -> None:
        """Write this root as a squashfs file.

        Raises:
            UserError: mksquashfs failed.
        """
        words = host_programs.SQUASHFS_OPTIONS
        program = host_programs.find_program("mksquashfs")
        with self.cache.scratch() as scratch:
            merged = scratch / "merged"
            merged.mkdir()
            if len(self.layers) == 1:
                # The kernel lays no single folder over nothing.
                source = str(self.cache.root / self.layers[0])
                command = ("mksquashfs", source, str(target), *words)
                host_programs.run_program(
                    command, what="squashfs", cwd=scratch, timeout_s=_PACK_LIMIT_S
                )
                return
            outside = (program, str(merged), str(target), *words)
            job = SetupJob(
                layers=self.layers, upper="", work="", merged=str(merged), outside=outside
            )
            _run(job, self.cache.root, _JobDescription("squashfs", _PACK_LIMIT_S))

    def _layer(
        self, address: str, make: Callable[[Path], SetupJob], how: "_JobDescription"
    ) -> "RootFilesystem":
        def build(folder: Path) -> None:
            for name in ("upper", "work", "merged"):
                (folder / name).mkdir()
            (folder / "upper").chmod(0o755)
            _run(make(folder), self.cache.root, how)
            # The kernel leaves a folder of its own there.
            shutil.rmtree(folder / "work")
            (folder / "merged").rmdir()

        self.cache.entry("layers", address, build)
        layers = (f"layers/{address}/upper", *self.layers)
        return RootFilesystem(cache=self.cache, address=address, layers=layers)

    def _job(self, folder: Path) -> SetupJob:
        upper, work, merged = (str(folder / name) for name in ("upper", "work", "merged"))
        return SetupJob(layers=self.layers, upper=upper, work=work, merged=merged)


class _JobDescription(NamedTuple):
    """Name of a job in errors, and its time limit."""

    what: str
    timeout_s: float


def _run(job: SetupJob, cwd: Path, how: _JobDescription) -> None:
    """Run a job in a process of its own.

    Raises:
        UserError: the command failed, or took too long.
    """
    text = json.dumps(dataclasses.asdict(job))
    process = subprocess.Popen(
        (sys.executable, "-s", "-B", "-m", "etude.envserver.images.setup_step", text),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=how.timeout_s)
    except BaseException as cause:
        # Its child is process 1 of a namespace and dies with it, and so does all that it started.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(cause, subprocess.TimeoutExpired):
            took = f"took longer than {how.timeout_s:.0f} s"
            raise UserError(
                host_programs.build_failure(how.what, took, cause.output or b"")
            ) from cause
        raise
    if process.returncode != 0:
        ended = f"ended with {process.returncode}"
        raise UserError(host_programs.build_failure(how.what, ended, output))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
