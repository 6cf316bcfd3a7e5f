"""The namespaces of one cluster: made around one process, gone with it."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from layout import Layout

HERE = Path(__file__).parent
CGROUPS = Path("/sys/fs/cgroup")
PRIVATE = (
    *("/run/containerd", "/run/netns", "/var/lib/kubelet", "/var/lib/cni"),
    *("/var/log/pods", "/var/log/containers"),
)
"""Places that components hard-code; each cluster gets its own below its run folder."""


def start(layout: Layout) -> int:
    """Namespaces, cable, routes and cgroups; answers the host pid of the holder.

    Raises:
        RuntimeError: the namespaces did not come up; its log says why.
    """
    created = [folder for folder in PRIVATE if not Path(folder).exists()]
    for folder in created:
        Path(folder).mkdir(parents=True)
    (layout.run / "created").write_text("\n".join(created), encoding="utf-8")
    (layout.run / "inside").unlink(missing_ok=True)
    holder = spawn(
        layout,
        "init",
        (
            *("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
            *("--propagation", "private", "bash", str(HERE / "init.sh"), str(layout.run)),
            *PRIVATE,
        ),
    )
    poll(lambda: (layout.run / "inside").exists() or not alive(holder), "namespaces", 10)
    if not alive(holder):
        raise RuntimeError((layout.logs / "init.log").read_text(encoding="utf-8"))
    _connect(layout, holder)
    _make_cgroups(layout)
    return holder


def stop(layout: Layout) -> None:
    """End every process of the cluster, then remove what the kernel does not."""
    holder = recorded(layout, "init")
    if holder is not None and _is_ours(layout, holder):
        os.kill(holder, signal.SIGKILL)
        poll(lambda: not alive(holder), "the end of the cluster", 30)
    _ip("link", "del", layout.link, check=False)
    _remove_cgroups(layout)
    _remove_created(layout)
    shutil.rmtree(layout.run, ignore_errors=True)


def _remove_created(layout: Layout) -> None:
    """Remove the folders that were made for mounts, or leave that to a cluster that still stands.

    A folder that is removed takes along what other clusters have mounted on it.
    """
    folders = _words(layout.run / "created")
    others = (path for path in layout.run.parent.glob("cluster-*/created"))
    heir = next((path for path in others if path.parent != layout.run), None)
    if heir is not None and folders:
        with heir.open("a", encoding="utf-8") as file:
            file.write("\n" + "\n".join(folders))
        return
    for folder in folders:
        with contextlib.suppress(OSError):
            Path(folder).rmdir()


def enter(holder: int, command: tuple[str, ...], *, mounts: bool = True) -> tuple[str, ...]:
    """The command inside the namespaces; its working folder becomes /."""
    inside = ("-n", "-m", "-p") if mounts else ("-n", "-p")
    return ("nsenter", "-t", str(holder), *inside, "--", "nice", "-n", "5", *command)


def take_addresses(holder: int, addresses: str) -> None:
    """Let processes inside listen on every address of a range, as if each were a host's own."""
    words = ("nsenter", "-t", str(holder), "-n", "ip", "route", "add", "local", addresses)
    subprocess.run((*words, "dev", "lo"), check=True, timeout=30)


def spawn(layout: Layout, name: str, command: tuple[str, ...]) -> int:
    """Start a process with a log of its own; records and answers the pid that does the work.

    Raises:
        RuntimeError: it ended at once; the message is its log.
    """
    log = layout.logs / f"{name}.log"
    with log.open("ab") as output:
        outer = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd="/",
        )
    # nsenter -p and unshare --fork work through a child; that is the pid to keep.
    children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
    with contextlib.suppress(TimeoutError):
        poll(lambda: outer.poll() is not None or bool(_words(children)), name, 5)
    found = _words(children)
    if outer.poll() is not None or not found:
        raise RuntimeError(f"{name} did not start: {log.read_text(errors='replace')[-2000:]}")
    (layout.pids / name).write_text(found[0], encoding="utf-8")
    return int(found[0])


def recorded(layout: Layout, name: str) -> int | None:
    """The pid that was recorded for a process."""
    path = layout.pids / name
    return int(path.read_text(encoding="utf-8")) if path.exists() else None


def alive(pid: int) -> bool:
    """Whether any thread of the process is more than a zombie.

    The first thread may be one while others still end: then its sockets are not closed yet.
    """
    return any(_is_alive(stat) for stat in Path(f"/proc/{pid}/task").glob("*/stat"))


def _is_alive(stat: Path) -> bool:
    try:
        state = stat.read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False  # it ended meanwhile
    return state not in {"Z", "X"}


def poll(done: Callable[[], bool], what: str, limit_s: float, *, every_s: float = 0.02) -> None:
    """Wait until done answers true.

    Raises:
        TimeoutError: it did not within the limit.
    """
    deadline_s = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"waited {limit_s:g} s for {what}")
        time.sleep(every_s)


def _is_ours(layout: Layout, pid: int) -> bool:
    """Whether the pid still is this cluster's holder: numbers are used again."""
    try:
        return str(layout.run) in Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8")
    except OSError:
        return False


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split()
    except OSError:
        return []


def _connect(layout: Layout, holder: int) -> None:
    inside = ("nsenter", "-t", str(holder), "-n", "ip")
    _ip("link", "add", layout.link, "type", "veth", "peer", "name", "eth0", "netns", str(holder))
    _ip("addr", "add", f"{layout.host_ip}/30", "dev", layout.link)
    _ip("link", "set", layout.link, "up")
    for words in (f"addr add {layout.node_ip}/30 dev eth0", "link set eth0 up"):
        subprocess.run((*inside, *words.split()), check=True, capture_output=True, timeout=60)
    for reached in (layout.service_range, layout.pod_range):
        _ip("route", "add", reached, "via", layout.node_ip)


def _ip(*arguments: str, check: bool = True) -> None:
    done = subprocess.run(("ip", *arguments), check=False, capture_output=True, timeout=60)
    if check and done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.decode(errors='replace')}")


def _hierarchies() -> Iterator[Path]:
    """Each mounted hierarchy of cgroup v1; the one of v2 when there is no other."""
    if (CGROUPS / "cgroup.controllers").exists():
        yield CGROUPS
        return
    yield from (path for path in CGROUPS.iterdir() if path.is_dir() and not path.is_symlink())


def _make_cgroups(layout: Layout) -> None:
    for hierarchy in _hierarchies():
        group = hierarchy / layout.name
        group.mkdir(exist_ok=True)
        for name in ("cpuset.cpus", "cpuset.mems"):
            if (hierarchy / name).exists() and hierarchy.name == "cpuset":
                (group / name).write_bytes((hierarchy / name).read_bytes())


def _remove_cgroups(layout: Layout) -> None:
    for hierarchy in _hierarchies():
        group = hierarchy / layout.name
        folders = sorted((path for path in group.rglob("*") if path.is_dir()), reverse=True)
        for folder in (*folders, group):
            with contextlib.suppress(OSError):
                folder.rmdir()
