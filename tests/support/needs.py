"""What a machine lacks for a test: then it is skipped, or fails where nothing may be skipped."""

import os
import shutil
from collections.abc import Callable
from typing import NoReturn

import pytest
from tests.support.vm import gvisors, microvms

from etude.common.errors import UserError
from etude.envserver.drivers.vm.qemu.command_line import PROGRAM
from etude.envserver.images.built_image import BuiltImage

Need = Callable[[], None]


def is_required(*suites: str) -> bool:
    """Whether ETUDE_REQUIRE names one of these, so that nothing of it may be skipped."""
    return os.environ.get("ETUDE_REQUIRE") in suites


def skip(why: str, *suites: str) -> NoReturn:
    """Skip the test, or fail it where one of its suites is required."""
    if is_required(*suites):
        pytest.fail(why, pytrace=False)
    pytest.skip(why)


def machines() -> None:
    """QEMU, and the rights for jails of machines and roots of images."""
    if shutil.which(PROGRAM) is None:
        skip(f"{PROGRAM} is not installed: `make system-deps` installs it", "qemu")
    if os.geteuid() != 0:
        skip("jails of machines and roots of images need root", "qemu")


def containers() -> None:
    """A runsc that works, and the rights for containers and roots of images."""
    if os.geteuid() != 0:
        skip("containers of gVisor and roots of images need root", "gvisor", "qemu")
    if why := gvisors.missing():
        skip(f"{why}: make system-deps", "gvisor", "qemu")


def image_programs() -> None:
    """The programs that move and unpack images, and the rights for roots."""
    if missing := [name for name in ("skopeo", "umoci", "mksquashfs") if not shutil.which(name)]:
        skip(f"{missing[0]} is not installed: `make system-deps` installs it", "qemu")
    if os.geteuid() != 0:
        skip("roots of images need root", "qemu")


def small_image(*suites: str) -> BuiltImage:
    """The image that tests boot."""
    try:
        return microvms.small_image()
    except (RuntimeError, UserError) as error:
        skip(f"no image: {error}", *suites)
