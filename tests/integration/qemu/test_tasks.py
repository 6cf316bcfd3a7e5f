"""Tasks in microVMs: what verifies and lints on the process driver does so in a machine too."""

import json
import shutil
from pathlib import Path

import pytest

from etude.common.api.pool.spec import DriverName
from etude.common.errors import UserError
from etude.common.run_folder.state import images_folder
from etude.envserver.drivers.vm.qemu.command_line import PROGRAM
from etude.envserver.images import built_image
from etude.envserver.images.build_cache import BuildCache
from etude.envserver.images.built_image import GUEST_VERSION
from etude.envserver.tasks import lint, verify
from etude.envserver.tasks.runner import RunnerChoice

EXAMPLE = Path(__file__).parents[3] / "examples" / "tasks" / "rename-columns"


@pytest.fixture(scope="module")
def choice() -> RunnerChoice:
    """The newest image with Python that was built on this machine: a new one takes minutes."""
    if shutil.which(PROGRAM) is None:
        pytest.skip(f"{PROGRAM} is not installed: `make system-deps` installs it")
    for image in reversed(built_image.list_images(BuildCache(images_folder()))):
        manifest = json.loads((image.folder / "manifest.json").read_bytes())
        packages = manifest["spec"]["base"].get("debian", {}).get("packages", ())
        if "python3" in packages and image.guest_version == GUEST_VERSION:
            return RunnerChoice(driver=DriverName.QEMU_MICRO_VM, image=image.address)
    pytest.skip("no image with Python: etude images build examples/images/python.yaml")


async def test_the_example_is_proved(choice: RunnerChoice) -> None:
    (verdict,) = await verify.verify_tasks([EXAMPLE], choice)
    assert verdict.findings == ()
    assert (verdict.nothing, verdict.solution) == (0.0, 1.0)


@pytest.mark.long
async def test_the_example_is_clean(choice: RunnerChoice) -> None:
    (looked,) = await lint.lint_tasks([EXAMPLE], choice)
    assert (looked.findings, looked.scanned) == ((), 3)


async def test_an_image_that_is_not_there_is_said_by_name(choice: RunnerChoice) -> None:
    missing = RunnerChoice(driver=choice.driver, image="no-such-image")
    with pytest.raises(UserError, match="no-such-image"):
        await verify.verify_tasks([EXAMPLE], missing)
