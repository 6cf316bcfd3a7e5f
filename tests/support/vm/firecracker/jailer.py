"""The fake jailer: the arguments, folders, users and limits of docs/jailer.md, without the walls.

It joins the network namespace, becomes the machine's user, and the monitor in its own process. It
makes no control group, no namespace of processes and no chroot: the fake needs its libraries, QEMU.
"""

import argparse
import os
import re
import resource
import shutil
import sys
import time
from pathlib import Path

from tests.support.vm.firecracker import monitor
from tests.support.vm.firecracker.monitor import VERSION

from etude.envserver.isolation import syscalls

_ID = re.compile(r"[A-Za-z0-9-]{1,64}")
_PAIR = re.compile(r"[a-z_.]+=\S+")
_LIMITS = {"fsize": resource.RLIMIT_FSIZE, "no-file": resource.RLIMIT_NOFILE}


def parsed(words: list[str]) -> argparse.Namespace:
    """The arguments of the original; what is after `--` is for the monitor.

    Raises:
        SystemExit: one is unknown, missing or malformed.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="jailer")
    for name in ("--id", "--exec-file"):
        parser.add_argument(name, required=True)
    for name in ("--uid", "--gid"):
        parser.add_argument(name, required=True, type=int)
    for name in ("--cgroup", "--resource-limit"):
        parser.add_argument(name, action="append", default=[])
    parser.add_argument("--parent-cgroup")
    parser.add_argument("--cgroup-version", choices=("1", "2"), default="1")
    parser.add_argument("--chroot-base-dir", type=Path, default=Path("/srv/jailer"))
    parser.add_argument("--netns")
    parser.add_argument("--daemonize", action="store_true")
    parser.add_argument("--new-pid-ns", action="store_true")
    end = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:end])
    options.rest = words[end + 1 :]
    for problem, is_so in {
        "Invalid instance ID": not _ID.fullmatch(options.id),
        "the filename must include firecracker": "firecracker" not in Path(options.exec_file).name,
        "a cgroup is FILE=VALUE": not all(_PAIR.fullmatch(each) for each in options.cgroup),
        "Invalid format for resources": not all(
            each.partition("=")[0] in _LIMITS and each.partition("=")[2].isdecimal()
            for each in options.resource_limit
        ),
    }.items():
        if is_so:
            parser.error(problem)
    return options


def main() -> None:
    if sys.argv[1:] == ["--version"]:
        sys.stdout.write(f"Jailer v{VERSION}\n")
        return
    options = parsed(sys.argv[1:])
    program = Path(options.exec_file)
    root = options.chroot_base_dir / program.name / options.id / "root"
    root.mkdir(parents=True, exist_ok=True)
    shutil.copy(program, root / program.name)
    if options.netns:
        with open(options.netns, "rb") as netns:  # noqa: PTH123 - a file that is no path
            syscalls.enter_namespace(netns.fileno(), syscalls.NEW_NETWORK)
    os.chdir(root)
    os.chown(".", options.uid, options.gid)
    child = os.fork() if options.new_pid_ns else 0
    if child:
        Path(f"{program.name}.pid").write_text(str(child))
        return
    for limit in options.resource_limit:
        name, _, value = limit.partition("=")
        resource.setrlimit(_LIMITS[name], (int(value), int(value)))
    os.setgroups([])
    os.setgid(options.gid)
    os.setuid(options.uid)
    times = ["--start-time-us", str(time.monotonic_ns() // 1000), "--start-time-cpu-us", "0"]
    os.environ.clear()
    # Not executed: the interpreter may lie where this user cannot read. All of it is imported.
    monitor.run(["--id", options.id, *times, "--parent-cpu-time-us", "0", *options.rest])


if __name__ == "__main__":
    main()
