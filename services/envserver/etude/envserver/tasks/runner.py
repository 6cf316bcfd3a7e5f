"""Runner of tasks: a driver of this machine, started with the templates that the tasks need."""

import argparse
import contextlib
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

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
from etude.common.run_folder.state import images_folder
from etude.envserver import exit_codes
from etude.envserver.drivers import selection
from etude.envserver.drivers.base import Driver
from etude.envserver.drivers.selection import DriverFolders
from etude.envserver.host.grading import Grader
from etude.envserver.host.result_cache import ResultCache
from etude.envserver.host.workspace_sources import WorkspaceSources

_NAMES = {"process": DriverName.PROCESS, "qemu-microvm": DriverName.QEMU_MICRO_VM}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerChoice:
    """Driver and image to run tasks in."""

    driver: DriverName = DriverName.PROCESS
    image: str = ""
    """Image for tasks that name none, with microVMs."""
    slot: Slot = field(default_factory=Slot)
    """Resources of each sandbox, as a pool has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRunner:
    """A started driver, and the template of each image."""

    driver: Driver
    choice: RunnerChoice
    templates: Mapping[str, str]
    sources: WorkspaceSources

    def grader(self) -> Grader:
        """Make a grader as hosts have it."""
        return Grader(self.driver, ResultCache())

    def template(self, task: HarborTask) -> str:
        """The template for a task.

        Raises:
            UserError: the driver cannot give what the task needs.
        """
        if task.image and self.choice.driver is DriverName.PROCESS:
            raise UserError(
                Problem(
                    "DriverUnavailable",
                    what=f"needs its image {task.image}, which driver process cannot run",
                    where=task.task_id,
                    fix=f"etude images build {task.folder}/image.yaml, then --driver qemu-microvm",
                )
            )
        return self.templates[_image(task, self.choice)]


def _image(task: HarborTask, choice: RunnerChoice) -> str:
    return task.image or choice.image if choice.driver is DriverName.QEMU_MICRO_VM else ""


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
    images = sorted({_image(task, choice) for task in _readable(folders)} or {choice.image})
    if "" in images and choice.driver is DriverName.QEMU_MICRO_VM:
        raise UserError(
            Problem("Usage", "names no image for a microVM to boot", "--image", "name one")
        )
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
            )
        finally:
            await driver.stop()


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
        fix = "add --driver qemu-microvm"
        raise UserError(Problem("Usage", "is for microVMs only", "--image", fix))
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
