"""Files of a task's step in a real sandbox: they enter by the tools that policies have."""

import random
from collections.abc import Mapping

import pytest
from tests.support.environments.pool_client import Pool

from etude.common.blobs import MemoryStore
from etude.common.harbor.task_file import StepSection
from etude.trainer.rollouts import task_steps
from etude.v1 import environments_pb2

LARGE = random.Random(3).randbytes(300_000)


def commands(files: Mapping[str, bytes]) -> list[str]:
    store = MemoryStore()
    store.put("steps/ice/instruction.md", b"Ice it.\n")
    for path, data in files.items():
        store.put(f"steps/ice/workdir/{path}", data)
    (step,) = task_steps.read_steps(store, [StepSection(name="ice")])
    return task_steps.prepare_commands(step)


async def run_all(pool: Pool, lease: environments_pb2.Lease, given: list[str]) -> list[str]:
    return [
        (await pool.turn(lease, (f"ice/{number}", "run_terminal", {"command": each})))[0]
        for number, each in enumerate(given)
    ]


@pytest.mark.parametrize("toolset", ["Compact", "Standard"])
async def test_what_a_step_brings_is_part_of_the_change(pool: Pool, toolset: str) -> None:
    pool.toolset = toolset
    (lease,) = await pool.launch("a")
    brought = {
        "sub/größe 'x'.bin": LARGE,
        "shop/core.py": b"def add(a, b):\n    return a + b\n",
        "setup.sh": b"pwd > where.txt\n",
    }
    given = commands(brought)
    assert len(given) > 6, "a large file enters in parts"
    *first, last = await run_all(pool, lease, given)
    assert ({*first}, last) == ({"(no output)"}, "ready")
    written = {each.path: each.content for each in (await pool.diff(lease)).written}
    assert written == {**brought, "where.txt": b"/workspace\n"}


async def test_a_set_up_of_a_step_that_fails_says_why(pool: Pool) -> None:
    (lease,) = await pool.launch("a")
    given = commands({"setup.sh": b"echo no sugar >&2; exit 3\n"})
    assert (await run_all(pool, lease, given))[-1] == "no sugar"
    assert [each.path for each in (await pool.diff(lease)).written] == ["setup.sh"]


async def test_a_link_that_the_policy_left_in_place_of_the_archive_is_replaced(pool: Pool) -> None:
    (lease,) = await pool.launch("a")
    await pool.turn(lease, ("1", "run_terminal", {"command": "ln -s shop/core.py .etude-step"}))
    assert (await run_all(pool, lease, commands({"sugar": b"sweet\n"})))[-1] == "ready"
    assert [each.path for each in (await pool.diff(lease)).written] == ["sugar"]


def test_a_step_without_files_needs_no_command() -> None:
    assert commands({}) == []
