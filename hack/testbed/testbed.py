"""A real one-node Kubernetes without Docker: build, up, down, status, restart."""

import argparse
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import build
import components
import config
import holder
import images
import pki
from layout import MAX_CLUSTERS, Layout

ROOT = Path(__file__).parents[2]
SECCOMP = ROOT / "helm" / "etude" / "files" / "seccomp"
LEVELS = ("apiserver", "kwok", "node")


def obstacle() -> str:
    """Why no cluster can run here; empty when one can."""
    if os.geteuid() != 0:
        return "it needs root for namespaces of its own"
    wanted = ("nft", "containerd", "runc", "ctr", "busybox", "ip", "openssl", "nsenter", "unshare")
    absent = [name for name in wanted if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed: run `make system-deps`"
    lacking = build.missing(build.folder())
    if lacking:
        return f"{', '.join(lacking)} not built: run `python hack/testbed/build.py`"
    if not os.access(holder.CGROUPS, os.W_OK):
        return f"{holder.CGROUPS} is not writable"
    entered = subprocess.run(
        ("unshare", "--net", "--mount", "--pid", "--fork", "true"), check=False, capture_output=True
    )
    return "" if entered.returncode == 0 else f"unshare: {entered.stderr.decode().strip()}"


def up(level: str, owner: int, audited: str = "") -> Layout:
    """Start a cluster under the first free number.

    Args:
        level: apiserver for etcd, API server and controllers; kwok for those, a scheduler and what
            pretends to be the kubelet of annotated nodes; node for everything.
        owner: process whose end makes the cluster stale; 0 for none.
        audited: user whose requests the API server writes down; nobody's when empty.

    Raises:
        RuntimeError: something did not start; the cluster is taken down again.
    """
    layout = _reserve(owner)
    try:
        _start(layout, level, audited)
    except BaseException:
        kept = build.CACHE / f"failed-{layout.index}"
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(layout.logs, kept)
        holder.stop(layout)
        sys.stderr.write(f"testbed: the logs are in {kept}\n")
        raise
    return layout


def _reserve(owner: int) -> Layout:
    build.CACHE.mkdir(parents=True, exist_ok=True)
    with (build.CACHE / ".lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for index in range(MAX_CLUSTERS):
            layout = _layout(index)
            if layout.run.exists():
                if not _is_stale(layout):
                    continue
                holder.stop(layout)
            for folder in (layout.run, layout.conf, layout.logs, layout.pids):
                folder.mkdir(parents=True)
            state = {
                "index": index,
                "owner": owner,
                "kubeconfig": str(layout.kubeconfig),
                "node_ip": layout.node_ip,
                "host_ip": layout.host_ip,
                "run": str(layout.run),
                "binaries": str(layout.binaries),
                "audit_log": str(layout.audit_log),
                "image": images.BASE,
            }
            layout.state.write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
            return layout
    raise RuntimeError(f"{MAX_CLUSTERS} clusters are running already")


def _layout(index: int) -> Layout:
    return Layout(
        run=build.CACHE / f"cluster-{index}", index=index, binaries=build.folder().absolute()
    )


def _is_stale(layout: Layout) -> bool:
    """Whether the owner of a cluster is gone, or it never came up."""
    if not layout.state.exists():
        return True
    owner = json.loads(layout.state.read_text(encoding="utf-8"))["owner"]
    init = holder.recorded(layout, "init")
    if owner and not holder.alive(owner):
        return True
    return not owner and (init is None or not holder.alive(init))


def _start(layout: Layout, level: str, audited: str) -> None:
    pki.create(layout)
    config.write(layout, trees=bound_trees())
    if audited:
        config.write_audit_policy(layout, audited)
    cluster = components.Cluster(layout, holder.start(layout))
    if level == "node":
        components.start(cluster, "containerd")
    for name in ("etcd", "kube-apiserver"):
        components.start(cluster, name)
    if level == "node":
        components.wait_for_containerd(cluster)
        _import_images(cluster)
    components.wait_for_api(layout)
    # Not earlier: it ends when its account has no rights yet, and nobody starts it again.
    components.start(cluster, "kube-controller-manager")
    if level == "node":
        _start_node(cluster)
    if level == "kwok":
        holder.take_addresses(cluster.init, layout.fake_range)
        for name in ("kube-scheduler", "kwok"):
            components.start(cluster, name)
    components.wait_for_account(layout)


def _start_node(cluster: components.Cluster) -> None:
    layout = cluster.layout
    # As an administrator would: Localhost profiles are files of the node.
    shutil.copytree(SECCOMP, layout.run / "kubelet" / "seccomp" / "etude")
    for name in ("kube-scheduler", "kubelet", "kube-proxy"):
        components.start(cluster, name)
    kubectl(layout, "apply", "-f", f"{layout.conf}/base.json")
    components.start(cluster, "coredns")
    components.wait_for_address(cluster, "http://127.0.0.1:10256/healthz")
    components.wait_for_address(cluster, "http://127.0.0.1:8181/ready")
    components.wait_for_node(layout)


def _import_images(cluster: components.Cluster) -> None:
    layout = cluster.layout
    pause, base = layout.run / "pause.tar", layout.run / "base.tar"
    images.write_pause(pause, Path(layout.binary("pause")))
    images.write_base(base, [ROOT / ".venv" / "bin"])
    for archive in (pause, base):
        components.import_image(cluster, archive)


def bound_trees() -> list[Path]:
    """What containers see of the host, read-only: interpreter, system libraries, checkout."""
    python = (ROOT / ".venv" / "bin" / "python").resolve()
    home = python.parents[1]
    if home == Path("/usr"):
        return [home, ROOT]
    firmware = [each for each in images.FIRMWARE if each.exists()]
    return [home, images.SYSTEM_LIBRARIES, *firmware, ROOT]


def kubectl(layout: Layout, *arguments: str) -> str:
    """Run kubectl as administrator.

    Raises:
        RuntimeError: it failed; the message is what it said.
    """
    words = (layout.binary("kubectl"), "--kubeconfig", str(layout.kubeconfig), *arguments)
    done = subprocess.run(words, check=False, capture_output=True, timeout=120)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.decode(errors="replace"))
    return done.stdout.decode()


def _clusters() -> list[Layout]:
    return [layout for layout in map(_layout, range(MAX_CLUSTERS)) if layout.run.exists()]


def _command_up(arguments: argparse.Namespace) -> int:
    reason = obstacle()
    if reason:
        sys.stderr.write(f"testbed: no cluster here: {reason}\n")
        return 69  # EX_UNAVAILABLE: tests skip on it, anything else is a failure
    begun_s = time.monotonic()
    layout = up(arguments.level, arguments.owner, arguments.audit)
    sys.stdout.write(layout.state.read_text(encoding="utf-8"))
    sys.stderr.write(f"testbed: up in {time.monotonic() - begun_s:.1f} s\n")
    return 0


def _command_build(_: argparse.Namespace) -> int:
    build.build(lambda line: print(f"testbed: {line}", flush=True))
    return 0


def _command_down(arguments: argparse.Namespace) -> int:
    for layout in _clusters():
        # Without a number: those that were started by hand, and what tests left behind.
        is_meant = (
            _is_nobodys(layout) if arguments.index is None else arguments.index == layout.index
        )
        if arguments.all or is_meant:
            holder.stop(layout)
    return 0


def _is_nobodys(layout: Layout) -> bool:
    if not layout.state.exists():
        return False  # it is being started
    owner: int = json.loads(layout.state.read_text(encoding="utf-8"))["owner"]
    return not owner or not holder.alive(owner)


def _command_status(_: argparse.Namespace) -> int:
    for layout in _clusters():
        parts = [
            f"{name} {'up' if up_ else 'DOWN'}" for name, up_ in components.running(layout).items()
        ]
        sys.stdout.write(f"cluster {layout.index}: {', '.join(parts)}\n")
        sys.stdout.write(f"  export KUBECONFIG={layout.kubeconfig}\n")
    return 0


def _command_restart(arguments: argparse.Namespace) -> int:
    layout = _layout(arguments.index)
    init = holder.recorded(layout, "init")
    if init is None:
        sys.stderr.write(f"testbed: there is no cluster {arguments.index}\n")
        return 1
    number = signal.Signals[f"SIG{arguments.signal}"]
    components.restart(components.Cluster(layout, init), arguments.component, number)
    return 0


def _command_image(arguments: argparse.Namespace) -> int:
    layout = _layout(arguments.index)
    init = holder.recorded(layout, "init")
    if init is None:
        sys.stderr.write(f"testbed: there is no cluster {arguments.index}\n")
        return 1
    archive = arguments.archive
    if archive is None:
        archive = layout.run / "programs.tar"
        images.write_programs(archive, arguments.name, arguments.program)
    components.import_image(components.Cluster(layout, init), archive)
    return 0


def main() -> int:
    """Run one command."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build", help="build the binaries")
    starts = commands.add_parser("up", help="start a cluster and print where it is")
    starts.add_argument("--level", choices=LEVELS, default="node")
    starts.add_argument("--owner", type=int, default=0, help="its end makes the cluster stale")
    starts.add_argument("--audit", default="", help="user whose requests are written down")
    stops = commands.add_parser("down", help="take a cluster down and leave nothing behind")
    stops.add_argument("--index", type=int, help="this one, also if a test is using it")
    stops.add_argument("--all", action="store_true", help="also those of other people")
    commands.add_parser("status", help="which clusters and processes are up")
    again = commands.add_parser("restart", help="kill one component and start it again")
    again.add_argument("component", choices=sorted(components.NAMES))
    again.add_argument("--index", type=int, default=0)
    again.add_argument("--signal", default="KILL")
    brings = commands.add_parser("image", help="bring an image to the node")
    brings.add_argument("--index", type=int, default=0)
    brings.add_argument("--name", default="localhost/programs:1", help="of the one that is made")
    from_ = brings.add_mutually_exclusive_group(required=True)
    from_.add_argument("--program", type=Path, action="append", help="make it of static programs")
    from_.add_argument("--archive", type=Path, help="import a docker archive or an OCI archive")
    arguments = parser.parse_args()
    actions = {
        "build": _command_build,
        "up": _command_up,
        "down": _command_down,
        "status": _command_status,
        "restart": _command_restart,
        "image": _command_image,
    }
    return actions[arguments.command](arguments)


if __name__ == "__main__":
    sys.exit(main())
