"""The golden run in a machine of its own."""

from pathlib import Path

import pytest
from tests.harness.golden.calls import ALL, Need
from tests.harness.golden.stages import leased
from tests.harness.golden.transcript import FILE, differences, left_out, paragraphs, play
from tests.harness.golden.tree import TREE
from tests.support.vm import microvms

from etude.envserver.drivers.vm.qemu.driver import QemuDriver
from etude.envserver.images.built_image import BuiltImage

HAS = ALL - {Need.GNU}
"""The small image has Busybox, whose words for what went wrong are others."""


@pytest.mark.long
async def test_a_microvm_gives_the_golden_results(
    image: BuiltImage, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    driver = QemuDriver(scratch=tmp_path, images={"small": image}, machine=microvms.small_machine())
    await driver.start()
    try:
        async with leased(driver, HAS, template="small") as stage:
            rows = await play(stage, TREE)
    finally:
        await driver.stop()
    request.node.add_report_section("call", "left out", "\n".join(left_out(rows)))
    assert not list(differences(rows, paragraphs(FILE.read_text())))
    assert {need for row in rows for need in row.missing} == {Need.GNU}
