"""The image of the demo's environments: built if missing; the accelerator that boots it here.

python -m etude.demo.image [--only-with-kvm]
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from etude.agent import minitest
from etude.common.errors import UserError
from etude.common.run_folder.state import images_folder
from etude.envserver import exit_codes
from etude.envserver.drivers.process.root_filesystem import PYTEST
from etude.envserver.drivers.vm import host_cpu
from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.drivers.vm.jail import KVM, jail_with_kvm
from etude.envserver.drivers.vm.qemu import kvm_probe
from etude.envserver.drivers.vm.qemu.command_line import QemuConfig
from etude.envserver.images import builder
from etude.envserver.images.build_cache import BuildCache
from etude.envserver.images.built_image import BuiltImage
from etude.envserver.images.command import find_agent
from etude.envserver.images.spec import DebianBase, ImageBase, ImageFile, ImageSpec
from etude.envserver.isolation.sandbox_layout import TOOLS

NAME = "demo"


def spec() -> ImageSpec:
    """Debian's Python, and the test runner that the demo's policy knows as pytest."""
    command = PYTEST.format(python="/usr/bin/python3", tools=TOOLS)
    return ImageSpec(
        name=NAME,
        base=ImageBase(debian=DebianBase(packages=("python3", "ripgrep"))),
        files=(
            ImageFile(path=f"{TOOLS}/bin/pytest", text=command, mode="0755"),
            ImageFile(path=f"{TOOLS}/lib/minitest.py", text=Path(minitest.__file__).read_text()),
        ),
    )


def main(arguments: Sequence[str]) -> int:
    """Print one JSON object: the image's address, the accelerator, and why that one."""
    parser = argparse.ArgumentParser(prog="python -m etude.demo.image")
    parser.add_argument(
        "--only-with-kvm", action="store_true", help="build nothing where there is no /dev/kvm"
    )
    given = parser.parse_args(arguments)
    if given.only_with_kvm and not os.access(KVM, os.R_OK | os.W_OK):
        return _answer("", "tcg", f"{KVM} cannot be opened")
    try:
        agent = find_agent(None, os.environ, Path.home())
        image = builder.build(spec(), agent=agent, cache=BuildCache(images_folder()), say=_say)
        probe = asyncio.run(_probe(image))
    except (UserError, OSError) as error:
        return exit_codes.report_error(error)
    except VmmError as error:
        sys.stderr.write(f"{error}\n")
        return exit_codes.NO
    return _answer(image.address, "kvm" if probe.works else "tcg", probe.why)


async def _probe(image: BuiltImage) -> kvm_probe.KvmProbeResult:
    with tempfile.TemporaryDirectory(prefix="etude-probe-") as scratch:
        config = QemuConfig(tsc_khz=host_cpu.host_tsc_khz())
        return await kvm_probe.probe_kvm(image, config, jail=jail_with_kvm(), scratch=Path(scratch))


def _answer(image: str, accelerator: str, why: str) -> int:
    row = {"image": image, "accelerator": accelerator, "why": why}
    sys.stdout.write(json.dumps(row) + "\n")
    return 0


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
