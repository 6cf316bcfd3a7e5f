"""The golden run in a container of gVisor."""

import pytest
from tests.harness.golden.calls import ALL, Need
from tests.harness.golden.stages import leased
from tests.harness.golden.transcript import FILE, differences, left_out, paragraphs, play
from tests.harness.golden.tree import TREE

from etude.envserver.drivers.gvisor.driver import GvisorDriver

HAS = ALL - {Need.GNU}
"""The small image has Busybox, whose words for what went wrong are others."""


async def test_a_container_gives_the_golden_results(
    driver: GvisorDriver, request: pytest.FixtureRequest
) -> None:
    async with leased(driver, HAS, template="small") as stage:
        rows = await play(stage, TREE)
    request.node.add_report_section("call", "left out", "\n".join(left_out(rows)))
    assert not list(differences(rows, paragraphs(FILE.read_text())))
    assert {need for row in rows for need in row.missing} == {Need.GNU}
