"""Images built from a Dockerfile by buildah, and published where hosts pull from.

Covered: a RUN sees no file of the host, and what it makes stays in buildah's storage. Not covered:
it runs as root in a chroot, with the host's network and kernel: build the Dockerfiles of authors
that you trust.
"""

import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from etude.common.blobs import Store, open_store
from etude.common.errors import Problem, UserError
from etude.common.pinned_images import PinnedImage, parse_pinned
from etude.common.store_urls import folder_of
from etude.envserver.images.host_programs import find_program, run_program
from etude.envserver.images.pull.image_layout import TAG, image_config, image_parts
from etude.envserver.images.pull.registry_access import RegistryAccess

_LIMIT_S = 7_200.0
_PUSH_LIMIT_S = 1_800.0
_NAME = "localhost/etude-task:1"


class PublishedImage(NamedTuple):
    """An image that was built and can be pulled."""

    image: PinnedImage
    folder: str
    """WORKDIR; empty where it names none."""


def build_dockerfile(
    context: Path,
    into: str,
    *,
    storage: Path,
    registries: RegistryAccess,
    say: Callable[[str], None],
) -> PublishedImage:
    """Build the image of a folder with a Dockerfile, and publish it.

    Args:
        context: the folder.
        into: a registry's HOST/REPOSITORY, or a file:// or s3:// folder of OCI layouts.
        storage: folder of buildah's layers, so that a second build repeats only what changed.
        registries: access to registries, for bases and for the image.
        say: called with a line for each step.

    Raises:
        UserError: there is no Dockerfile, a step failed, or the image cannot be published.
    """
    if not (context / "Dockerfile").is_file():
        fix = "name a folder with a Dockerfile"
        raise UserError(Problem("NotFound", "has no Dockerfile", str(context), fix))
    if os.geteuid() != 0:
        fix = "run this as root, or take a published image with --pin"
        raise UserError(Problem("PermissionDenied", "is built by root alone", str(context), fix))
    with tempfile.TemporaryDirectory(prefix="etude-build-") as folder, _locked(storage):
        scratch = Path(folder)
        env = {**registries.program_environment(scratch), "BUILDAH_ISOLATION": "chroot"}
        # buildah leaves a mount of its storage behind, which ends with this namespace.
        program = ["unshare", "--mount", find_program("buildah")]
        program += ["--root", str(storage / "root"), "--runroot", str(storage / "run")]
        auth = registries.skopeo_options("--authfile")
        say(f"build {context} …")
        words = [*program, "build", "--layers", "--force-rm", "--timestamp", "0", *auth]
        words += ["--tag", _NAME, "--file", str(context / "Dockerfile"), str(context.resolve())]
        run_program(words, what=f"build {context}", cwd=scratch, timeout_s=_LIMIT_S, env=env)
        words = [*program, "push", "--quiet", _NAME, f"oci:{scratch / 'layout'}:{TAG}"]
        run_program(words, what="export", cwd=scratch, timeout_s=_PUSH_LIMIT_S, env=env)
        workdir = str(image_config(scratch / "layout").get("WorkingDir") or "")
        say(f"publish into {into} …")
        if "://" in into:
            return PublishedImage(_publish_layout(scratch / "layout", into), workdir)
        words = ["skopeo", "--insecure-policy", "copy", "--quiet", *auth, "--digestfile", "digest"]
        words += [f"oci:{scratch / 'layout'}:{TAG}", f"docker://{into}"]
        run_program(words, what=f"push {into}", cwd=scratch, timeout_s=_PUSH_LIMIT_S, env=env)
        digest = (scratch / "digest").read_text(encoding="ascii").strip()
    return PublishedImage(parse_pinned(f"{into}@{digest}"), workdir)


def _publish_layout(layout: Path, into: str) -> PinnedImage:
    """Add the image of a layout to a folder or prefix of layouts: the manifest comes last."""
    if (folder := folder_of(into)) is not None:
        folder.mkdir(parents=True, exist_ok=True)
    store = open_store(into)
    listed = json.loads((layout / "index.json").read_bytes())["manifests"][0]
    image = PinnedImage(into.rstrip("/"), listed["digest"])
    store.put("oci-layout", (layout / "oci-layout").read_bytes())
    for digest in (*image_parts(layout), image.digest):
        _add_blob(store, layout, f"blobs/sha256/{digest.removeprefix('sha256:')}")
    return image


def _add_blob(store: Store, layout: Path, key: str) -> None:
    path = layout / key
    found = store.head(key)
    if found is None or found.size != path.stat().st_size:
        store.put(key, path.read_bytes())


@contextmanager
def _locked(storage: Path) -> Iterator[None]:
    """Hold the storage alone: two builds would use one name."""
    storage.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (storage / ".lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
