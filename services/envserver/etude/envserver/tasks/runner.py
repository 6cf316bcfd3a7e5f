"""A driver of this machine for trying tasks out, with what each task wants to run in."""

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
from etude.envserver.drivers.selection import Place
from etude.envserver.host.grading import Grader
from etude.envserver.host.result_cache import ResultCache

_NAMES = {"process": DriverName.PROCESS, "qemu-microvm": DriverName.QEMU_MICRO_VM}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How tasks are run."""

    driver: DriverName = DriverName.PROCESS
    image: str = ""
    """What a microVM boots for tasks that name no image of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A driver that was started, and the template of each image."""

    driver: Driver
    choice: Choice
    templates: Mapping[str, str]

    def grader(self) -> Grader:
        """A grader as nodes have it."""
        return Grader(self.driver, ResultCache())

    def template(self, task: HarborTask) -> str:
        """The template that a task is run in.

        Raises:
            UserError: the driver cannot give what the task needs.
        """
        if task.image and self.choice.driver is DriverName.PROCESS:
            raise UserError(
                Problem(
                    "DriverUnavailable",
                    what=f"needs its image {task.image}, and driver process knows no images",
                    where=task.task_id,
                    fix=f"etude images build {task.folder}/image.yaml, then --driver qemu-microvm",
                )
            )
        return self.templates[_image(task, self.choice)]


def _image(task: HarborTask, choice: Choice) -> str:
    return task.image or choice.image if choice.driver is DriverName.QEMU_MICRO_VM else ""


@contextlib.asynccontextmanager
async def opened(
    choice: Choice, tasks: Sequence[HarborTask], scratch: Path
) -> AsyncIterator[Bench]:
    """A bench for these tasks; its driver ends with the block.

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
    driver = await selection.selected(spec, Place(scratch=scratch, images=images_folder()))
    await driver.start()
    try:
        yield Bench(driver=driver, choice=choice, templates=templates)
    finally:
        await driver.stop()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Let a program's user choose."""
    parser.add_argument("--driver", choices=sorted(_NAMES), default="process")
    parser.add_argument("--image", default="", help="booted for tasks that name none")


def choice(given: argparse.Namespace) -> Choice:
    """What the user chose.

    Raises:
        UserError: an image for a driver that knows none.
    """
    driver = _NAMES[given.driver]
    if given.image and driver is DriverName.PROCESS:
        fix = "add --driver qemu-microvm"
        raise UserError(Problem("Usage", "is for microVMs only", "--image", fix))
    return Choice(driver=driver, image=given.image)
