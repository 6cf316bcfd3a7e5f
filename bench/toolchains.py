"""Node, Java, Go and Rust in environments with the default slot: build, test, change, much output.

python bench/toolchains.py [--only NAME …] [--vm NAME …] [--output-mib 2000] [--folder DIR]

Images are Debian by debootstrap with the toolchain, built by buildah. In each environment the
suite fails, the bug is mended with search_replace, the build fills a folder that the repository
ignores, which is then made as large as asked, and the suite is green. What comes back has to be
the mended file alone. With --vm this is done in a VM too, whose memory is a fraction of the output;
it is forked then, and the fork has the same output, its own disk, and the same change. Broker and
node run as processes, as in production, without a network. All files are removed at the end.

Examples:
  make bench-toolchains
  python bench/toolchains.py --only go --vm   a first look
"""

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # figures are recorded as tests do

from environment_bench.pool import DEADLINE_S, Client
from images_bench.pool import ImagePool, running
from tests.support import figures
from tests.support.vm import microvms
from toolchains_bench.toolchains import TOOLCHAINS, Toolchain, build_image

from etude.envserver.drivers.selection import DEFAULT_MEMORY_MIB
from etude.envserver.images.build_cache import BuildCache
from etude.v1 import environments_pb2

CALL_LIMIT_S = 280
"""Below the deadline of a turn."""
FILE_MIB = 500
NEEDED_GIB = 10
"""Free on the disk before anything is made; an image takes 5 while it is built and used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolchainResult:
    """Figures of one environment."""

    name: str
    driver: str
    build_s: float = 0.0
    test_s: float = 0.0
    output_mib: int = 0
    """Of the ignored folder, when the change was asked for."""
    fork_output_mib: int = 0
    """The same in the fork of a VM."""
    snapshot_s: float = 0.0
    is_green: bool = False
    is_source_alone: bool = False
    cpu_s: float = 0.0
    note: str = ""


async def try_toolchain(pool: ImagePool, image: str, name: str, output_mib: int) -> ToolchainResult:
    """Work in one environment as a policy does."""
    toolchain = TOOLCHAINS[name]
    async with running(pool) as client:
        (lease,) = await client.launch(uri="empty:", image=image)
        failed, _ = await _shell(client, lease, toolchain.test)
        if not failed:
            return ToolchainResult(name=name, driver=pool.driver, note="green with the bug")
        change = {"path": toolchain.source, "old_string": toolchain.wrong}
        await client.turn(lease, ("search_replace", {**change, "new_string": toolchain.right}))
        began_s = time.perf_counter()
        why, _ = await _shell(client, lease, toolchain.build)
        built_s = time.perf_counter()
        more, _ = ("", "") if why else await _shell(client, lease, toolchain.test)
        tested_s = time.perf_counter()
        full = await _fill(client, lease, toolchain, output_mib)
        size, changed = await _seen(client, lease, toolchain)
        fork = _Fork(0, changed, 0.0)
        if pool.driver != "GVisor":
            fork = await _fork(client, lease, toolchain, image)
        is_alone = changed == fork.changed == [toolchain.source]
        note = why or more or full or ("" if is_alone else str([*changed, *fork.changed]))
        return ToolchainResult(
            name=name,
            driver=pool.driver,
            build_s=built_s - began_s,
            test_s=tested_s - built_s,
            output_mib=size,
            fork_output_mib=fork.output_mib,
            snapshot_s=fork.snapshot_s,
            is_green=not (why or more),
            is_source_alone=is_alone,
            cpu_s=pool.node_cpu_s(),
            note=note[:160],
        )


@dataclass(frozen=True, slots=True)
class _Fork:
    output_mib: int
    changed: list[str]
    snapshot_s: float


async def _fork(
    client: Client, lease: environments_pb2.Lease, toolchain: Toolchain, image: str
) -> _Fork:
    """Fork the environment, write to both, and look at the fork."""
    began_s = time.perf_counter()
    await client.snapshot(lease, "filled")
    took_s = time.perf_counter() - began_s
    await _shell(client, lease, f"rm -rf {toolchain.ignored}/filling-*")
    (fork,) = await client.launch(uri="empty:", image=image, snapshot_id="filled")
    await _shell(client, fork, f"echo fork > {toolchain.ignored}/fork")
    size, changed = await _seen(client, fork, toolchain)
    return _Fork(size, changed, took_s)


async def _seen(
    client: Client, lease: environments_pb2.Lease, toolchain: Toolchain
) -> tuple[int, list[str]]:
    """MiB of the ignored folder, and the files that the environment says were changed."""
    _, size = await _shell(client, lease, f"du -sm {toolchain.ignored} | cut -f1")
    return int(size or 0), await _changed_files(client, lease)


async def _shell(client: Client, lease: environments_pb2.Lease, command: str) -> tuple[str, str]:
    """Run a command; returns why it failed, and its output."""
    call = {"command": command, "timeout": CALL_LIMIT_S}
    (result,) = await client.turn(lease, ("run_terminal", call))
    text = result.content.decode(errors="replace").strip()
    is_failed = result.is_error or (text.endswith("]") and "\n[" in f"\n{text}")
    return (text[-400:] or "failed") if is_failed else "", text


async def _fill(
    client: Client, lease: environments_pb2.Lease, toolchain: Toolchain, output_mib: int
) -> str:
    """Make the ignored folder as large as asked; returns why that failed."""
    for number in range(output_mib // FILE_MIB):
        path = f"{toolchain.ignored}/filling-{number}"
        why, _ = await _shell(client, lease, f"head -c {FILE_MIB}M /dev/zero >{path}")
        if why:
            return why
    return ""


async def _changed_files(client: Client, lease: environments_pb2.Lease) -> list[str]:
    request = environments_pb2.DiffRequest(
        lease_id=lease.lease_id, control_token=lease.control_token
    )
    data = bytearray()
    async for answer in client.node.Diff(request, timeout=DEADLINE_S):
        if answer.too_large:
            return [answer.too_large]
        data += answer.chunk
    diff = environments_pb2.WorkspaceDiff.FromString(bytes(data))
    return [*(file.path for file in diff.written), *diff.deleted]


def measure(
    console: Console, names: Sequence[str], vms: Sequence[str], folder: Path, output_mib: int
) -> list[ToolchainResult]:
    """Try each toolchain in a pool of its own; a failure is a row."""
    found = []
    for name in dict.fromkeys((*names, *vms)):
        drivers = ["GVisor"] * (name in names) + ["QemuMicroVM"] * (name in vms)
        with tempfile.TemporaryDirectory(prefix=f"etude-bench-{name}-", dir=folder) as place:
            work = Path(place)
            try:
                image = build_image(name, work, BuildCache(folder / "base"), console.log)
            except Exception as error:  # noqa: BLE001 - the next toolchain is tried all the same
                console.log(f"{name} cannot be built: {error}")
                found.append(ToolchainResult(name=name, driver="-", note=f"{error}"[-160:]))
                continue
            for driver in drivers:
                console.log(f"{name} with {driver} …")
                found.append(_measure_driver(work, image, name, driver, output_mib))
                console.log(str(found[-1]))
                _record(found[-1])
    return found


def _measure_driver(
    work: Path, image: str, name: str, driver: str, output_mib: int
) -> ToolchainResult:
    with tempfile.TemporaryDirectory(prefix="pool-", dir=work) as place:
        pool = ImagePool(
            folder=Path(place),
            image=microvms.small_image().folder,
            slots=2,
            driver=driver,
            layout=work / "layouts",
            settings={"ETUDE_IMAGES": str(Path(place) / "images")},
        )
        try:
            return asyncio.run(try_toolchain(pool, image, name, output_mib))
        except Exception as error:  # noqa: BLE001 - the next toolchain is tried all the same
            return ToolchainResult(name=name, driver=driver, note=f"{error!r}"[:160])


def _record(row: ToolchainResult) -> None:
    prefix = f"{row.name}_{row.driver.lower()}"
    figures.record(
        "toolchains",
        **{
            f"{prefix}_green": int(row.is_green),
            f"{prefix}_source_alone": int(row.is_source_alone),
            f"{prefix}_output_mib": row.output_mib,
            f"{prefix}_output_of_memory": round(row.output_mib / DEFAULT_MEMORY_MIB, 2),
            f"{prefix}_fork_output_mib": row.fork_output_mib,
            f"{prefix}_snapshot_s": round(row.snapshot_s, 2),
            f"{prefix}_build_s": round(row.build_s, 2),
            f"{prefix}_test_s": round(row.test_s, 2),
            f"{prefix}_cpu_s": round(row.cpu_s, 2),
        },
    )


def _table(rows: Sequence[ToolchainResult]) -> Table:
    table = Table("toolchain", "driver", "green", "source alone", "output MiB", "of memory")
    for column in ("fork MiB", "snapshot s", "build s", "test s", "CPU-s", "note"):
        table.add_column(column)
    for row in rows:
        seconds = (f"{each:.1f}" for each in (row.snapshot_s, row.build_s, row.test_s, row.cpu_s))
        kinds = (row.name, row.driver, str(row.is_green), str(row.is_source_alone))
        sizes = (str(row.output_mib), f"{row.output_mib / DEFAULT_MEMORY_MIB:.1f}x")
        table.add_row(*kinds, *sizes, str(row.fork_output_mib), *seconds, row.note)
    return table


def main() -> None:
    """Print the table and write bench/out/toolchains.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=TOOLCHAINS, default=list(TOOLCHAINS))
    parser.add_argument("--vm", nargs="*", choices=TOOLCHAINS, default=list(TOOLCHAINS))
    parser.add_argument("--output-mib", type=int, default=2_000)
    parser.add_argument(
        "--folder", type=Path, help="where everything is made; a new one, unless given"
    )
    given = parser.parse_args()
    console = Console(width=180)
    with tempfile.TemporaryDirectory(prefix="etude-toolchains-") as place:
        folder = given.folder.resolve() if given.folder else Path(place)
        folder.mkdir(parents=True, exist_ok=True)
        free_gib = shutil.disk_usage(folder).free >> 30
        if free_gib < NEEDED_GIB:
            sys.exit(f"{folder} has {free_gib} GiB free, and {NEEDED_GIB} are needed")
        rows = measure(console, given.only, given.vm, folder, given.output_mib)
    console.print(_table(rows))
    sys.exit(0 if all(row.is_green and row.is_source_alone for row in rows) else 1)


if __name__ == "__main__":
    main()
