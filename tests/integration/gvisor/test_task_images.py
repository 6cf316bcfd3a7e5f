"""Leases whose tasks name an image by digest: pulled when a task needs it, evicted by age."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support import needs
from tests.support.environments.image_leases import (
    opened,
    opened_at_last,
    says,
    settled,
    write_image,
)
from tests.support.vm import guests

from etude.common.api.pool.spec import DriverName
from etude.common.errors import UserError
from etude.envserver.drivers.base import Verification
from etude.envserver.drivers.gvisor.driver import GvisorDriver
from etude.envserver.host.grading.grader import Grader
from etude.envserver.host.host import Host
from etude.envserver.host.task_images import TaskImages
from etude.envserver.host.workspace_change import ChangeTooLargeError
from etude.envserver.host.workspace_sources import WorkspaceSources
from etude.envserver.images.build_cache import BuildCache
from etude.envserver.images.built_image import BuiltImage
from etude.envserver.images.pull.pulled_image import ImagePuller
from etude.envserver.storage.folders import FolderLimits
from etude.envserver.storage.trees import File
from etude.envserver.tasks import runner, verify
from etude.envserver.tasks.runner import RunnerChoice
from etude.v1 import environments_pb2

TEST = (
    b"#!/bin/sh\nmkdir -p /logs/verifier\ngrep -c fixed /app/shop.txt > /logs/verifier/reward.txt\n"
)


@pytest.fixture
async def host(driver: GvisorDriver, tmp_path: Path) -> AsyncIterator[Host]:
    needs.image_programs()
    puller = ImagePuller(cache=BuildCache(tmp_path / "cache"))
    sources = [(tmp_path / "layouts").as_uri()]
    images = TaskImages(driver=driver, puller=puller, sources=sources, budget_bytes=32 << 20)
    made = Host(
        driver=driver,
        sources=WorkspaceSources(tmp_path),
        slots=8,
        templates={"small"},
        images=images,
    )
    made.endpoint = "127.0.0.1:1"
    yield made
    await made.close([each.lease.lease_id for each in made.held_leases()])
    await images.close()


async def test_a_lease_begins_with_the_repository_of_its_tasks_image(
    host: Host, tmp_path: Path
) -> None:
    image = write_image(tmp_path / "layouts/one", "one")
    await opened_at_last(host, "a", image)
    told = await says(
        host, "a", "cat /etc/word; echo; readlink /workspace; cat /app/shop.txt; ls; id -u"
    )
    assert told.split() == ["one", "/app", "broken", "run", "shop.txt", "target", "1000"]
    await says(host, "a", "echo fixed > /app/shop.txt")
    changed = await host.find("a").diff()
    assert [(each.path, each.content) for each in changed.written] == [("shop.txt", b"fixed\n")]

    # Hidden tests run on the same image.
    work = Verification(
        template=host.find("a").record.template,
        workspace={"shop.txt": File(b"fixed\n")},
        tests={"test.sh": File(TEST)},
        command="sh /tests/test.sh",
        timeout_s=60,
        reward_path="/logs/verifier/reward.txt",
    )
    graded = await host.driver.verify(work)
    assert graded.collected == b"1\n"


async def test_commands_go_by_env_user_and_workdir_of_the_image(host: Host, tmp_path: Path) -> None:
    image = write_image(tmp_path / "layouts/one", "one", User="builder", WorkingDir="/usr/src/app")
    await opened_at_last(host, "a", image)
    told = await says(
        host, "a", "say $WORD:$USER:$HOME:$CI; readlink /workspace; echo 1 > ~/notes; id -u"
    )
    assert told.split("\n")[:3] == ["of the image:builder:/home/builder:1", "/usr/src/app", "1000"]

    # Hidden tests have the same variables.
    work = Verification(
        template=host.find("a").record.template,
        workspace={},
        tests={"test.sh": File(b"mkdir -p /logs; say $WORD$USER > /logs/said\n")},
        command="sh /tests/test.sh",
        timeout_s=60,
        reward_path="/logs/said",
    )
    assert (await host.driver.verify(work)).collected == b"of the imagebuilder\n"


GRADE = b"""mkdir -p /logs/verifier
cd /app
cat shop.txt new.txt notes/task.md target/built > /logs/verifier/reward.txt
[ -e run ] && echo run is there >> /logs/verifier/reward.txt
true
"""


async def test_a_change_is_found_without_what_is_ignored_and_graded_on_the_image(
    host: Host, tmp_path: Path
) -> None:
    image = write_image(tmp_path / "layouts/one", "one")
    files = tmp_path / "environment"
    (files / "notes").mkdir(parents=True)
    (files / "notes/task.md").write_text("by the task\n")
    await opened_at_last(host, "a", image, files.as_uri())
    assert "by the task" in await says(host, "a", "cat notes/task.md")
    untouched = await host.find("a").diff()
    assert not untouched.written
    assert not untouched.deleted
    await says(host, "a", "echo fixed > shop.txt; echo new > new.txt; rm run; echo big > target/x")
    environment = host.find("a")
    change = await environment.diff()
    assert [(each.path, each.content) for each in sorted(change.written, key=by_path)] == [
        ("new.txt", b"new\n"),
        ("shop.txt", b"fixed\n"),
    ]
    assert change.deleted == ["run"]

    job = environments_pb2.GradeJob(
        diff=change,
        files=[environments_pb2.WorkspaceFile(path="test.sh", content=GRADE)],
        command="sh /tests/test.sh",
        timeout_seconds=60,
        reward_path="/logs/verifier/reward.txt",
    )
    grader = Grader(host.driver, host.cache)
    graded = await grader.grade(environment.source, job, template=environment.record.template)
    assert graded.reward_file == b"fixed\nnew\nby the task\nwith the image\n"


def by_path(file: environments_pb2.WorkspaceFile) -> str:
    return file.path


async def test_a_change_beyond_the_limits_is_the_policys_fault(host: Host, tmp_path: Path) -> None:
    image = write_image(tmp_path / "layouts/one", "one")
    host.change_limits = FolderLimits(max_files=10, max_bytes=1 << 20)
    await opened_at_last(host, "a", image)
    await says(host, "a", "for i in 1 2 3 4 5 6 7 8 9 10 11; do echo $i > $i; done")
    with pytest.raises(ChangeTooLargeError, match="10 files"):
        await host.find("a").diff()
    await says(host, "a", "mkdir -p target/deep; mv 1 2 3 target/deep")
    assert len((await host.find("a").diff()).written) == 8


@pytest.mark.long  # 2 GB are written
async def test_gigabytes_of_ignored_output_are_no_part_of_a_change(
    host: Host, tmp_path: Path
) -> None:
    image = write_image(tmp_path / "layouts/one", "one")
    await opened_at_last(host, "a", image)
    await says(host, "a", "echo fixed > shop.txt")
    for number in range(4):
        command = f"dd if=/dev/zero of=target/{number} bs=1M count=512 2>&1 | tail -1; ls -l target"
        assert "536870912" in await says(host, "a", command)
    change = await host.find("a").diff()
    assert [each.path for each in change.written] == ["shop.txt"]
    assert change.ByteSize() < 100


async def test_a_successor_adopts_a_lease_with_an_image_of_its_task(
    host: Host, tmp_path: Path
) -> None:
    image = write_image(tmp_path / "layouts/one", "one")
    await opened_at_last(host, "a", image)
    await says(host, "a", "echo fixed > shop.txt")
    assert host.images is not None
    images = TaskImages(
        driver=host.driver,
        puller=host.images.puller,
        sources=host.images.sources,
        budget_bytes=32 << 20,
    )
    successor = Host(
        driver=host.driver, sources=host.sources, slots=8, templates={"small"}, images=images
    )
    assert await successor.take_over() == (1, 0)
    assert "fixed" in await says(successor, "a", "cat shop.txt /etc/word")
    assert "of the image" in await says(successor, "a", "say $WORD")


async def test_an_image_in_use_stays_and_the_one_used_least_recently_goes(
    host: Host, tmp_path: Path
) -> None:
    images = host.images
    assert images is not None
    one, two, three = (
        write_image(tmp_path / "layouts" / name, name) for name in ("one", "two", "three")
    )
    await opened_at_last(host, "a", one)
    await opened_at_last(host, "b", two)
    await host.close(["b"])
    images.budget_bytes = 1
    await opened_at_last(host, "c", three)
    await guests.until(lambda: not images.pulled_digests)
    assert images.digests == sorted([one.rpartition("@")[2], three.rpartition("@")[2]])
    assert (await says(host, "a", "cat /etc/word")).startswith("one")
    folders = BuildCache(tmp_path / "cache").entries("pulled")
    assert len(folders) == 2


async def test_an_image_that_is_absent_fails_its_own_leases_alone(
    host: Host, tmp_path: Path
) -> None:
    good = write_image(tmp_path / "layouts/one", "one")
    absent = f"{good.rpartition('@')[0]}@sha256:{'0' * 64}"
    assert (await opened(host, "a", absent)).failure.reason == "ImageNotReady"
    await opened_at_last(host, "b", good)
    outcome = await settled(host, "a", absent)
    assert outcome.failure.reason == "ImageUnavailable"
    assert "is missing" in outcome.failure.message
    assert (await says(host, "b", "cat /etc/word")).startswith("one")


async def test_an_image_of_another_source_is_never_fetched(host: Host, tmp_path: Path) -> None:
    image = write_image(tmp_path / "elsewhere", "one")
    outcome = await opened(host, "a", image)
    assert outcome.failure.reason == "InvalidArgument"
    assert "spec.images.sources" in outcome.failure.message


async def test_a_task_that_names_an_image_by_digest_is_verified_on_it(
    image: BuiltImage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs.image_programs()
    task = tmp_path / "fix-shop"
    reference = write_image(tmp_path / "layouts/one", "one")
    files = {
        "task.toml": f'[metadata]\netude_image = "{reference}"\n',
        "instruction.md": "Repair the shop.\n",
        "tests/test.sh": TEST.decode(),
        "solution/solve.sh": "echo fixed > /workspace/shop.txt\n",
    }
    for name, text in files.items():
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        (task / name).write_text(text)
    (task / "environment").mkdir()
    monkeypatch.setenv("ETUDE_IMAGES", str(image.folder.parents[1]))
    chosen = RunnerChoice(driver=DriverName.GVISOR, image=image.address)
    (proof,) = await verify.verify_tasks([task], chosen)
    assert proof.findings == ()
    assert (proof.nothing, proof.solution) == (0.0, 1.0)


async def test_tasks_are_mined_in_an_image_without_files_of_its_own_in_its_working_folder(
    image: BuiltImage, tmp_path: Path
) -> None:
    needs.image_programs()
    machine = RunnerChoice(driver=DriverName.GVISOR, image=image.address)
    empty = write_image(tmp_path / "layouts/empty", "empty", WorkingDir="/workspace")
    async with runner.open_runner(replace(machine, task_image=empty), []) as opened_runner:
        work = Verification(
            template=await opened_runner.prepare_suite(),
            workspace={"shop.txt": File(b"mine")},
            tests={},
            command="mkdir -p /logs && cat /etc/word shop.txt > /logs/out",
            timeout_s=60,
            reward_path="/logs/out",
        )
        assert (await opened_runner.driver.verify(work)).collected == b"emptymine"
    full = write_image(tmp_path / "layouts/full", "full")
    async with runner.open_runner(replace(machine, task_image=full), []) as opened_runner:
        with pytest.raises(UserError, match="has files in its working folder"):
            await opened_runner.prepare_suite()
