"""Digests of images that published tasks name by a tag."""

import json
import re
import tempfile
from pathlib import Path

from etude.common.pinned_images import InvalidImageError, PinnedImage, parse_pinned
from etude.envserver.images.host_programs import run_program
from etude.envserver.images.pull.registry_access import RegistryAccess

_LIMIT_S = 60.0
_TAGGED = re.compile(r"(?P<name>[a-zA-Z0-9./:_-]*?[a-z0-9])(:[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?")
_HUB = "docker.io"


def pin_image(reference: str, registries: RegistryAccess) -> PinnedImage:
    """Ask a registry which digest a tag means now.

    Args:
        reference: as in a Dockerfile; without a host it is one of Docker Hub.
        registries: access to registries.

    Raises:
        InvalidImageError: it is no reference.
        UserError: the registry does not answer, or has no such image.
    """
    if "@" in reference:
        return parse_pinned(reference)
    match = _TAGGED.fullmatch(reference)
    if match is None:
        raise InvalidImageError(reference[:256], "is not an image's name", "give HOST/NAME:TAG")
    name, tag = _full_name(match["name"]), match[2] or ":latest"
    with tempfile.TemporaryDirectory(prefix="etude-pin-") as folder:
        scratch = Path(folder)
        words = ["skopeo", "inspect", "--no-tags", *registries.skopeo_options("--authfile")]
        found = run_program(
            [*words, f"docker://{name}{tag}"],
            what=f"pin {reference}",
            cwd=scratch,
            timeout_s=_LIMIT_S,
            env=registries.program_environment(scratch),
        )
    return parse_pinned(f"{name}@{json.loads(found)['Digest']}")


def _full_name(name: str) -> str:
    """A name with its host, as Docker completes it."""
    first, _, rest = name.partition("/")
    if rest and ("." in first or ":" in first or first == "localhost"):
        return name
    return f"{_HUB}/{name}" if rest else f"{_HUB}/library/{name}"
