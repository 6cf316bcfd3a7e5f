"""Images that tasks of a pool name by digest."""

from typing import Annotated

from pydantic import Field

from etude.common.api.meta import Model, NameRef

SOURCE = r"^((file:///|s3://)[^\s@]+|[a-z0-9][a-zA-Z0-9.:-]*(/[a-z0-9._-]+)*)$"
REGISTRY = r"^[a-z0-9][a-zA-Z0-9.:-]*(/[a-z0-9._-]+)*$"
Registry = Annotated[str, Field(max_length=256, pattern=REGISTRY)]
SourcePrefix = Annotated[str, Field(max_length=512, pattern=SOURCE)]


class RegistryMirror(Model):
    """A copy of a registry that is asked first."""

    registry: Registry
    """The registry as images name it: a host, alone or with a path, such as docker.io."""
    mirror: Registry
    """Host, alone or with a path, that stands for it."""


class TaskImages(Model):
    """Images that tasks name by digest, next to those of the templates."""

    sources: Annotated[tuple[SourcePrefix, ...], Field(min_length=1, max_length=64)]
    """Where they may come from: hosts of registries, alone or with a path, such as
    ghcr.io/acme, and folders of OCI image layouts, as file:///… and s3://…. Everything below one
    is taken; a task that names another image is refused."""
    pull_secret_ref: NameRef | None = None
    """Secret of type kubernetes.io/dockerconfigjson with the credentials of registries."""
    mirrors: Annotated[tuple[RegistryMirror, ...], Field(max_length=32)] = ()
    """Asked before their registries, in order. A mirror that lies is found out by the digest."""
    disk_mib: Annotated[int, Field(ge=256, le=64 << 20)] = 40_960
    """Disk space for them on each host: what was used least recently goes first, and nothing that
    an environment uses."""
