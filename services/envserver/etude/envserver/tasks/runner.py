"""Runner of tasks: a driver of this machine, started with the templates that the tasks need."""

import argparse
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.common.api.pool.spec import DriverName, EnvPoolSpec, Isolation, IsolationLevel, Template
from etude.common.errors import Problem, UserError
from etude.common.harbor.task import HarborTask
from etude.common.run_folder.state import images_folder
from etude.envserver.drivers import selection
from etude.envserver.drivers.base import Driver
from etude.envserver.drivers.selection import DriverFolders
from etude.envserver.host.grading import Grader
from etude.envserver.host.result_cache import ResultCache

_NAMES = {"process": DriverName.PROCESS, "qemu-microvm": DriverName.QEMU_MICRO_VM}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerChoice:
    """Driver and image to run tasks in."""

    driver: DriverName = DriverName.PROCESS
    image: str = ""
    """Image for tasks that name none, with microVMs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRunner:
    """A started driver, and the template of each image."""

    driver: Driver
    choice: RunnerChoice
    templates: Mapping[str, str]

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
    choice: RunnerChoice, tasks: Sequence[HarborTask], scratch: Path
) -> AsyncIterator[TaskRunner]:
    """Start a driver for these tasks; it ends with the block.

    Raises:
        UserError: this machine has no such driver, or lacks an image.
    """
    images = sorted({_image(task, choice) for task in tasks} or {choice.image})
    if "" in images and choice.driver is DriverName.QEMU_MICRO_VM:
        raise UserError(
            Problem("Usage", "names no image for a microVM to boot", "--image", "name one")
        )
    templates = {image: f"template-{number}" for number, image in enumerate(images)}
    spec = EnvPoolSpec(
        templates=tuple(Template(name=n, image=image or None) for image, n in templates.items()),
        isolation=Isolation(minimum=IsolationLevel.PROCESS, driver=choice.driver),
    )
    driver = await selection.select_driver(
        spec, DriverFolders(scratch=scratch, images=images_folder())
    )
    await driver.start()
    try:
        yield TaskRunner(driver=driver, choice=choice, templates=templates)
    finally:
        await driver.stop()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the runner to a program."""
    parser.add_argument("--driver", choices=sorted(_NAMES), default="process")
    parser.add_argument("--image", default="", help="booted for tasks that name none")


def parse_choice(given: argparse.Namespace) -> RunnerChoice:
    """Parse the options of the runner.

    Raises:
        UserError: an image is given for a driver without images.
    """
    driver = _NAMES[given.driver]
    if given.image and driver is DriverName.PROCESS:
        fix = "add --driver qemu-microvm"
        raise UserError(Problem("Usage", "is for microVMs only", "--image", fix))
    return RunnerChoice(driver=driver, image=given.image)
