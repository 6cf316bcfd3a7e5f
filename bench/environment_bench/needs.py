"""What benches of microVMs need of a machine."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from etude.envserver.drivers.vm.qemu.command_line import PROGRAM

ROOT = Path(__file__).parents[2]


def agent_here(bench: str, *programs: str) -> Path | None:
    """The guest's agent, which is built if it is not there.

    Args:
        bench: what is skipped, when the answer is None, and said to be.
        programs: what it needs beside QEMU and root.
    """
    missing = [name for name in (PROGRAM, *programs) if shutil.which(name) is None]
    missing += ["root"] if os.geteuid() != 0 else []
    found = ""
    if not missing:
        words = (sys.executable, str(ROOT / "hack" / "guest.py"), "--if-possible")
        found = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout
        missing = [] if found else ["the guest's agent"]
    if missing:
        print(f"{bench}: skipped, this machine lacks {', '.join(missing)}")
        return None
    return Path(found.removeprefix("guest: ").strip())
