"""Choice of the demo's sandbox driver on this host."""

import json
import subprocess
import sys
from collections.abc import Mapping
from enum import StrEnum

from etude.cli.output import say
from etude.common.errors import Problem, UserError

_POOL = "spec.roles.environments[repos].poolTemplate"


class DemoDriver(StrEnum):
    """Sandbox drivers that the demo takes, by their names in a pool's spec."""

    AUTO = "Auto"
    QEMU_MICRO_VM = "QemuMicroVM"
    PROCESS = "Process"


def driver_settings(driver: DemoDriver) -> list[str]:
    """The demo's pool on this driver, as settings of its manifest.

    Raises:
        UserError: microVMs are demanded, and this host cannot run them.
    """
    if driver is DemoDriver.PROCESS:
        return []
    found = _probe_image(only_with_kvm=driver is DemoDriver.AUTO)
    changes = choose_settings(driver, found)
    if not changes:
        why = last_line(found["why"])
        say(f"environments are processes, for microVMs would be slow here: {why}")
    return changes


def last_line(words: str) -> str:
    """The last line of a VMM's output, which names the cause."""
    return words.strip().rpartition("\n")[2]


def choose_settings(driver: DemoDriver, found: Mapping[str, str]) -> list[str]:
    """Settings that put the demo into microVMs, or none.

    Auto takes microVMs where the processor runs their instructions. Where QEMU translates them,
    a run of the tests costs too much for a demo of minutes.

    Args:
        driver: what was asked for.
        found: image, and the accelerator that was found for it.
    """
    if driver is DemoDriver.PROCESS or (
        driver is DemoDriver.AUTO and found["accelerator"] != "kvm"
    ):
        return []
    return [
        f"{_POOL}.isolation.driver={DemoDriver.QEMU_MICRO_VM}",
        # Quoted: an address of digits alone would be a number.
        f"{_POOL}.templates[python].image={json.dumps(found['image'])}",
    ]


def _probe_image(*, only_with_kvm: bool) -> dict[str, str]:
    # The environments part is never imported here: it runs as another process, as in a cluster.
    words = [sys.executable, "-m", "etude.demo.image"]
    options = ["--only-with-kvm"] if only_with_kvm else []
    done = subprocess.run([*words, *options], stdout=subprocess.PIPE, check=False)
    if done.returncode == 0:
        found: dict[str, str] = json.loads(done.stdout)
        return found
    if only_with_kvm:
        return {"accelerator": "none", "why": "see above"}
    raise UserError(
        Problem(
            "DriverUnavailable",
            what="this host cannot run microVMs: see above",
            where=f"--driver {DemoDriver.QEMU_MICRO_VM}",
            fix="make system-deps as root, python hack/guest.py; or --driver Process",
        )
    )
