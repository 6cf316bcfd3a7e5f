"""Specification of an image, read from a YAML file."""

import hashlib
import json
from pathlib import Path
from typing import Annotated, Self

import yaml
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError, model_validator

from etude.common.api.meta import Model, Name
from etude.common.errors import Problem, UserError

FORMAT = 1
"""Part of every digest: raised when the same spec makes another image."""
MAX_SPEC_BYTES = 1 << 20

Package = Annotated[str, Field(max_length=100, pattern=r"^[a-z0-9][a-z0-9+.-]+$")]
"""A Debian package's name, Debian Policy 5.6.1."""


def _inside(path: str) -> str:
    parts = path.split("/")
    if parts[0] or len(parts) < 2 or "\0" in path or any(p in {"", ".", ".."} for p in parts[1:]):
        raise ValueError("give an absolute path without empty parts, `.` and `..`")
    return path


AbsolutePath = Annotated[str, Field(max_length=1024), AfterValidator(_inside)]
"""A path in the image."""


class DebianBase(Model):
    """A root made by debootstrap from a Debian mirror."""

    suite: Annotated[str, Field(pattern=r"^[a-z]{3,20}$")] = "bookworm"
    mirror: Annotated[str, Field(max_length=512, pattern=r"^https?://[^\s]+$")] = (
        "http://deb.debian.org/debian"
    )
    """Packages are checked by the archive's signature, whatever the mirror."""
    packages: tuple[Package, ...] = ("python3", "git", "ripgrep", "ca-certificates")
    """Packages on top of the smallest system; python3-minimal would have no subprocess."""


class BusyboxBase(Model):
    """A root with the host's static busybox and nothing else: for tests and probes."""


class OciBase(Model):
    """A root unpacked from an OCI image layout on this machine."""

    layout: Annotated[str, Field(min_length=1, max_length=1024)]
    """A folder with `oci-layout` and `index.json`, absolute or relative to the spec."""
    digest: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
    """The manifest in it: a tag may come to mean something else."""


class ImageBase(Model):
    """Base of the root file system: exactly one of the fields."""

    debian: DebianBase | None = None
    busybox: BusyboxBase | None = None
    oci: OciBase | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of debian, busybox, oci; got {given or 'none'}")
        return self


class ImageFile(Model):
    """One file that is put into the root before the setup steps."""

    path: AbsolutePath
    text: Annotated[str, Field(max_length=MAX_SPEC_BYTES)]
    mode: Annotated[str, Field(pattern=r"^0[0-7]{3}$")] = "0644"


class SetupStep(Model):
    """One setup command, run as root inside the finished root."""

    run: Annotated[str, Field(min_length=1, max_length=65_536)]
    """Given to `/bin/sh -e`."""
    network: bool = False
    """True to let the step use the network of the build machine."""
    timeout_seconds: Annotated[int, Field(ge=1, le=7_200)] = 1_800


class Service(Model):
    """A process next to the agent that no agent can end, such as a database."""

    start: Annotated[str, Field(min_length=1, max_length=65_536)]
    """Given to `/bin/sh -e` as root: ends once the service answers, and leaves it running, as a
    user that is not the agent's, 1000."""


class ImageSpec(Model):
    """An image: what the guest boots, before anything of a task is in it."""

    name: Name
    base: ImageBase = ImageBase(debian=DebianBase())
    files: Annotated[tuple[ImageFile, ...], Field(max_length=10_000)] = ()
    setup: Annotated[tuple[SetupStep, ...], Field(max_length=64)] = ()
    """Cached one by one: a changed step repeats only itself and the following ones."""
    services: Annotated[tuple[Service, ...], Field(max_length=16)] = ()
    """Started one after the other when a VM boots, before anything of a task is in it."""
    kernel: Package = "linux-image-cloud-amd64"
    """A Debian kernel package, or one that depends on it."""


def read_spec(path: Path) -> ImageSpec:
    """Read the spec in a YAML or JSON file.

    Raises:
        UserError: it cannot be read, or a field is wrong; the message names the field.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_SPEC_BYTES + 1)
        if len(text) > MAX_SPEC_BYTES:
            raise UserError(_invalid(path, f"is longer than {MAX_SPEC_BYTES} bytes", "shorten it"))
        found = _SPEC.validate_python(yaml.safe_load(text))
    except OSError as cause:
        what = f"cannot be read: {cause.strerror}"
        raise UserError(Problem("NotFound", what, str(path), "name a file")) from cause
    except (yaml.YAMLError, RecursionError) as cause:
        raise UserError(_invalid(path, f"is not YAML: {cause}", "repair it")) from cause
    except ValidationError as cause:
        raise UserError(_invalid(path, _fields(cause), "correct the field")) from cause
    return _absolute(found, path.parent)


def digest(*parts: object) -> str:
    """Address of a result from its inputs: 32 hexadecimal digits.

    Parts are JSON values; anything that changes the result has to be one of them.
    """
    text = json.dumps([FORMAT, *parts], sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


_SPEC = TypeAdapter(ImageSpec)


def _absolute(spec: ImageSpec, folder: Path) -> ImageSpec:
    if spec.base.oci is None:
        return spec
    layout = str((folder / spec.base.oci.layout).resolve())
    oci = spec.base.oci.model_copy(update={"layout": layout})
    return spec.model_copy(update={"base": ImageBase(oci=oci)})


def _fields(error: ValidationError) -> str:
    return "; ".join(
        f"{'.'.join(str(part) for part in each['loc']) or 'the file'}: {each['msg']}"
        for each in error.errors(include_url=False)[:5]
    )


def _invalid(path: Path, what: str, fix: str) -> Problem:
    return Problem(reason="InvalidSpec", what=what, where=str(path), fix=fix)
