"""Diffs of a machine: those that the node asked for, whatever else its monitor writes."""

import os
from pathlib import Path

import pytest
from tests.unit.envserver.drivers.vm.firecracker.test_firecracker_parts import PAGE, PAGES, sparse

from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.drivers.vm.firecracker import template
from etude.envserver.drivers.vm.firecracker.jail import FirecrackerJail, FirecrackerPrograms
from etude.envserver.drivers.vm.firecracker.template import PendingDiffs


@pytest.fixture
def cell(tmp_path: Path) -> FirecrackerJail:
    programs = FirecrackerPrograms(firecracker=Path("/firecracker"), jailer=Path("/jailer"))
    made = FirecrackerJail(programs=programs, folder=tmp_path, vm_id="one")
    made.root.mkdir(parents=True)
    return made


def written(cell: FirecrackerJail, name: str, byte: int) -> None:
    os.close(sparse(cell.root / name, {byte: byte}))


def put_together(cell: FirecrackerJail, needed: str = "") -> set[int]:
    """The pages that differ from the template."""
    changed = template._merge_diffs(cell, PAGES * PAGE, needed=needed)
    try:
        content = os.pread(changed, PAGES * PAGE, 0)
    finally:
        os.close(changed)
    return set(content) - {0}


def test_diffs_are_put_together_once_each_also_those_of_a_process_that_died(
    cell: FirecrackerJail,
) -> None:
    for byte in (1, 2):
        written(cell, PendingDiffs(cell.folder).add(), byte)
    assert put_together(cell) == {1, 2}
    assert not PendingDiffs(cell.folder).pending()
    assert not list(cell.root.iterdir())
    written(cell, PendingDiffs(cell.folder).add(), 3)
    assert put_together(cell) == {1, 2, 3}


def test_what_nobody_asked_for_is_not_looked_at(cell: FirecrackerJail) -> None:
    for number in (0, 1, 7, 999):
        written(cell, f"diff-{number}", 9)
    (cell.root / "diff-5").symlink_to("/etc/passwd")
    written(cell, PendingDiffs(cell.folder).add(), 1)
    assert put_together(cell) == {1}
    assert (cell.root / "diff-1").exists()


def test_a_diff_that_was_asked_for_in_vain_is_left_out_unless_it_is_needed(
    cell: FirecrackerJail,
) -> None:
    name = PendingDiffs(cell.folder).add()
    with pytest.raises(VmmError, match=name):
        put_together(cell, needed=name)
    written(cell, PendingDiffs(cell.folder).add(), 1)
    assert put_together(cell) == {1}
