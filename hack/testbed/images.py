"""Container images without a registry: docker archives, written by hand."""

import hashlib
import io
import json
import subprocess
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

BUSYBOX = Path("/bin/busybox")
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
SYSTEM_LIBRARIES = Path("/usr/lib/x86_64-linux-gnu")
LOADER = "ld-linux-x86-64.so.2"
HOST_PROGRAMS = (
    Path("/usr/bin/lscpu"),
    Path("/usr/bin/prlimit"),
    Path("/usr/bin/setpriv"),
    Path("/usr/bin/qemu-system-x86_64"),
    Path("/usr/bin/unsquashfs"),
    Path("/usr/sbin/mke2fs"),
    Path("/usr/local/bin/runsc"),
)
"""What roles call beside Python: vLLM on CPU asks lscpu for the cores; the others start microVMs
and containers of gVisor, on a machine that has them."""
FIRMWARE = (Path("/usr/share/qemu"), Path("/usr/share/seabios"))
"""What QEMU loads into a machine before its guest."""
NOBODY = "65534"

BASE = "localhost/etude-base:1"
PAUSE = "localhost/pause:1"


class Entry(NamedTuple):
    """One file, link (with a target) or folder (with neither) of a layer."""

    path: str
    content: bytes | None = None
    target: str = ""
    mode: int = 0o755


def write_pause(path: Path, binary: Path) -> None:
    """The image that holds a pod's namespaces open."""
    entries = [Entry("pause", binary.read_bytes())]
    write(path, PAUSE, entries, command=["/pause"], environment=[])


def write_base(path: Path, commands: Sequence[Path]) -> None:
    """A skeleton with busybox: interpreter, libraries and code come from bound trees.

    Its PATH names the folders of the given commands first.
    """
    applets = subprocess.run((BUSYBOX, "--list"), check=True, capture_output=True, timeout=60)
    entries = [Entry("bin/busybox", BUSYBOX.read_bytes())]
    entries += [
        Entry(f"bin/{name}", target="busybox")
        for name in applets.stdout.decode().split()
        # A link to itself would destroy the image; the host's own program is the better one.
        if name not in {"busybox", *(each.name for each in HOST_PROGRAMS)}
    ]
    programs = (each for each in HOST_PROGRAMS if each.exists())
    # Where they are on the host: QEMU finds its firmware from its own place.
    entries += [Entry(str(each.relative_to("/")), each.read_bytes()) for each in programs]
    entries += [
        Entry("etc/passwd", b"root:x:0:0::/root:/bin/sh\nnobody:x:65534:65534::/tmp:/bin/sh\n"),
        Entry("etc/group", b"root:x:0:\nnogroup:x:65534:\n"),
        Entry("etc/nsswitch.conf", b"passwd: files\ngroup: files\nhosts: files dns\n"),
        Entry("etc/ssl/certs/ca-certificates.crt", _certificates(), mode=0o644),
        Entry("root"),
        Entry("tmp", mode=0o1777),
        Entry("usr/lib/x86_64-linux-gnu"),
        Entry("usr/lib64"),
        Entry(f"usr/lib64/{LOADER}", target=f"/lib/x86_64-linux-gnu/{LOADER}"),
        Entry("lib", target="usr/lib"),
        Entry("lib64", target="usr/lib64"),
    ]
    path_variable = ":".join((*map(str, commands), "/bin", "/usr/bin", "/usr/local/bin"))
    write(path, BASE, entries, command=["/bin/sh"], environment=[f"PATH={path_variable}"])


def write_programs(path: Path, name: str, programs: Sequence[Path]) -> None:
    """Static programs, and the folders that such programs want."""
    entries = [Entry(f"bin/{each.name}", each.read_bytes()) for each in programs]
    entries += [Entry("tmp", mode=0o1777), Entry("data", mode=0o777)]
    write(path, name, entries, command=[f"/bin/{programs[0].name}"], environment=["PATH=/bin"])


def _certificates() -> bytes:
    # obstore refuses even http:// without a bundle; an empty one is enough for that.
    return CERTIFICATES.read_bytes() if CERTIFICATES.exists() else b""


def write(
    path: Path, name: str, entries: Iterable[Entry], *, command: list[str], environment: list[str]
) -> None:
    """One image of one layer, the same bytes for the same content."""
    layer = _tar(entries)
    digest = hashlib.sha256(layer).hexdigest()
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Cmd": command, "Env": environment, "User": f"{NOBODY}:{NOBODY}"},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    body = json.dumps(config, sort_keys=True).encode()
    config_name = f"{hashlib.sha256(body).hexdigest()}.json"
    manifest = [{"Config": config_name, "RepoTags": [name], "Layers": [f"{digest}/layer.tar"]}]
    path.write_bytes(
        _tar(
            [
                Entry(config_name, body),
                Entry(f"{digest}/layer.tar", layer),
                Entry("manifest.json", json.dumps(manifest).encode()),
            ]
        )
    )


def _tar(entries: Iterable[Entry]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for entry in entries:
            info = tarfile.TarInfo(entry.path)
            info.mode = entry.mode
            if entry.target:
                info.type, info.linkname = tarfile.SYMTYPE, entry.target
            elif entry.content is None:
                info.type = tarfile.DIRTYPE
            else:
                info.size = len(entry.content)
            archive.addfile(info, io.BytesIO(entry.content or b""))
    return buffer.getvalue()
