"""What is said of an image that does not boot, with a console to look at and without."""

from pathlib import Path

import pytest
from tests.support.vm import microvms

from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.drivers.vm.qemu.driver import QemuDriver
from etude.envserver.images.built_image import BuiltImage


@pytest.mark.parametrize("said", ["Kernel panic - no init", ""])
def test_a_consoles_last_words_are_told_and_nobody_is_sent_to_look_for_them(
    tmp_path: Path, said: str
) -> None:
    driver = QemuDriver(scratch=tmp_path, images={}, machine=microvms.small_machine())
    image = BuiltImage(folder=tmp_path, name="python", address="a", files={})
    error = VmmError("the agent does not answer")
    error.add_note(said)
    problem = driver._boot_error(image, error).problem
    assert "python does not boot: the agent does not answer" in problem.what
    assert said in problem.what
    assert ("console" in problem.what) == bool(said)
    assert "console" not in problem.fix
