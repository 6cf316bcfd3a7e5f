"""Runner of tasks: a driver of this machine, started with the templates that the tasks need."""

import argparse
import contextlib
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from etude.common.api.pool.spec import (
    DriverName,
    EnvPoolSpec,
    Isolation,
    IsolationLevel,
    Slot,
    Template,
)
from etude.common.errors import EtudeError, Problem, UserError
from etude.common.harbor import task as harbor_task
from etude.common.harbor.task import HarborTask
from etude.common.pinned_images import is_pinned
from etude.common.run_folder.state import images_folder
from etude.envserver import exit_codes
from etude.envserver.drivers import selection
from etude.envserver.drivers.base import Driver
from etude.envserver.drivers.selection import DriverFolders
from etude.envserver.host.grading.grader import Grader
from etude.envserver.host.result_cache import ResultCache
from etude.envserver.host.task_images import TaskImages
from etude.envserver.host.workspace_sources import EMPTY, WorkspaceSource, WorkspaceSources
from etude.envserver.images.build_cache import BuildCache
from etude.envserver.images.pull.pulled_image import ImagePuller

_NAMES = {
    "process": DriverName.PROCESS,
    "qemu-microvm": DriverName.QEMU_MICRO_VM,
    "gvisor": DriverName.GVISOR,
}
_IMAGES_BYTES = 40 << 30
"""Disk space for images that tasks name by digest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerChoice:
    """Driver and image to run tasks in."""

    driver: DriverName = DriverName.PROCESS
    image: str = ""
    """Image for tasks that name none, and the machine of those that name one by its digest."""
    task_image: str = ""
    """Image, by its digest, of tasks that are being made."""
    slot: Slot = field(default_factory=Slot)
    """Resources of each sandbox, as a pool has them."""


class TaskPlace(NamedTuple):
    """Driver's name of a task's template, and the task's first files."""

    template: str
    source: WorkspaceSource


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRunner:
    """A started driver, and the template of each image."""

    driver: Driver
    choice: RunnerChoice
    templates: Mapping[str, str]
    sources: WorkspaceSources
    images: TaskImages

    def grader(self) -> Grader:
        """Make a grader as hosts have it."""
        return Grader(self.driver, ResultCache())

    async def prepare(self, task: HarborTask) -> TaskPlace:
        """Find the template of a task, after the pull of its image, and its first files.

        Raises:
            UserError: the driver cannot give what the task needs.
        """
        if task.image and self.choice.driver is DriverName.PROCESS:
            raise UserError(
                Problem(
                    "DriverUnavailable",
                    what=f"needs its image {task.image}, which driver process cannot run",
                    where=task.task_id,
                    fix=_image_fix(task),
                )
            )
        template = self.templates[_image(task, self.choice)]
        pulled = await self.images.get(template, task.image) if is_pinned(task.image) else None
        source = await self.sources.get(task.environment.absolute().as_uri(), pulled)
        return TaskPlace(template if pulled is None else pulled.name, source)

    async def prepare_suite(self) -> str:
        """Find the template of tasks that are being made, after the pull of their image.

        Raises:
            SandboxError: the image cannot be had.
            UserError: its working folder is not empty: the tasks bring the repository.
        """
        template, image = self.templates[self.choice.image], self.choice.task_image
        if not image:
            return template
        pulled = await self.images.get(template, image)
        source = await self.sources.get(EMPTY, pulled)
        if source.base:
            what = "has files in its working folder, where each task's repository comes"
            fix = "name an empty WORKDIR, and install what tests need elsewhere"
            raise UserError(Problem("InvalidImage", what, image, fix))
        return pulled.name


def _image_fix(task: HarborTask) -> str:
    if is_pinned(task.image):
        return "use --driver gvisor --image NAME, an image of etude images ls for kernel and agent"
    return f"etude images build {task.folder}/image.yaml, then --driver qemu-microvm"


def _image(task: HarborTask, choice: RunnerChoice) -> str:
    if choice.driver is DriverName.PROCESS:
        return ""
    return choice.image if is_pinned(task.image) else task.image or choice.image


@contextlib.asynccontextmanager
async def open_runner(
    choice: RunnerChoice | None, folders: Sequence[Path]
) -> AsyncIterator[TaskRunner]:
    """Start a driver for the tasks in these folders; it ends with the block.

    Args:
        choice: driver and image; the process driver unless given.
        folders: of tasks; those that cannot be read need no template.

    Raises:
        UserError: this machine has no such driver, or lacks an image.
    """
    choice = choice or RunnerChoice()
    tasks = list(_readable(folders))
    images = sorted({_image(task, choice) for task in tasks} or {choice.image})
    if "" in images and choice.driver is not DriverName.PROCESS:
        raise UserError(Problem("Usage", "names no image to start", "--image", "name one"))
    templates = {image: f"template-{number}" for number, image in enumerate(images)}
    spec = EnvPoolSpec(
        templates=tuple(Template(name=n, image=image or None) for image, n in templates.items()),
        isolation=Isolation(minimum=IsolationLevel.PROCESS, driver=choice.driver),
        slot=choice.slot,
    )
    with tempfile.TemporaryDirectory(prefix="etude-tasks-") as folder:
        scratch = Path(folder)
        driver = await selection.select_driver(
            spec, DriverFolders(scratch=scratch, images=images_folder())
        )
        await driver.start()
        try:
            yield TaskRunner(
                driver=driver,
                choice=choice,
                templates=templates,
                sources=WorkspaceSources(scratch / "sources"),
                images=_task_images(driver, [task.image for task in tasks] + [choice.task_image]),
            )
        finally:
            await driver.stop()


def _task_images(driver: Driver, images: Iterable[str]) -> TaskImages:
    """The images that these tasks name by digest, from wherever they name."""
    return TaskImages(
        driver=driver,
        puller=ImagePuller(cache=BuildCache(images_folder())),
        sources={image.rpartition("@")[0] for image in images if is_pinned(image)},
        budget_bytes=_IMAGES_BYTES,
    )


def _readable(folders: Sequence[Path]) -> Iterator[HarborTask]:
    for folder in folders:
        with contextlib.suppress(EtudeError):
            yield harbor_task.read_task(folder)


def chosen_folders(folder: Path, limit: int) -> list[Path]:
    """The task in a folder, or the first tasks of a folder of them.

    Raises:
        option_error: the limit is negative.
        UserError: there is no task.
    """
    if limit < 0:
        raise exit_codes.option_error("--limit", f"is {limit}", "use 0 for all, or more")
    is_task = (exit_codes.require_folder(folder) / "task.toml").is_file()
    folders = [folder] if is_task else harbor_task.task_folders(folder)
    return folders[: limit or None]


def make_parser(program: str, *, takes_tasks: bool = True) -> argparse.ArgumentParser:
    """Make the parser of a program that runs tasks; without those that it makes itself."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}")
    if takes_tasks:
        parser.add_argument("folder", type=Path, help="a task folder, or a folder of them")
        parser.add_argument("--limit", type=int, default=0, help="at most this many; 0 means all")
        parser.add_argument("--json", action="store_true", help="one JSON object per task")
    parser.add_argument("--driver", choices=sorted(_NAMES), default="process")
    parser.add_argument("--image", default="", help="booted for tasks that name none")
    parser.add_argument("--slot", default="", help="fields of a pool's slot, as processes=512,…")
    return parser


def parse_choice(given: argparse.Namespace) -> RunnerChoice:
    """Parse the options of the runner.

    Raises:
        UserError: an image is given for a driver without images.
    """
    driver = _NAMES[given.driver]
    if given.image and driver is DriverName.PROCESS:
        fix = "add --driver qemu-microvm, or gvisor"
        raise UserError(Problem("Usage", "is for microVMs and gVisor only", "--image", fix))
    return RunnerChoice(driver=driver, image=given.image, slot=_parse_slot(given.slot))


def _parse_slot(text: str) -> Slot:
    """The slot in `memoryMib=4096,processes=512`.

    Raises:
        option_error: it names no field of a slot, or a value that it does not take.
    """
    pairs = [part.partition("=") for part in text.split(",") if part]
    try:
        return Slot.model_validate({name.strip(): value.strip() for name, _, value in pairs})
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        what = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        fix = "give fields of a pool's slot, as memoryMib=4096,processes=512"
        raise exit_codes.option_error("--slot", what, fix) from error
