"""The files that a role starts from: its resolved object, and folders named by URI."""

import json
from pathlib import Path, PurePosixPath
from typing import TypeVar
from urllib.parse import unquote, urlparse

from etude.common.api.meta import Model
from etude.common.api.pool import EnvPoolSpec, StoreAccess
from etude.common.api.run import RLRunSpec
from etude.common.blobs import Store, open_store
from etude.common.errors import CorruptError, Problem, UserError

M = TypeVar("M", bound=Model)


class ResolvedRun(Model):
    """An accepted run, as its ConfigMap hands it to the roles."""

    name: str
    namespace: str = "default"
    uid: str
    generation: int = 1
    spec: RLRunSpec


class ResolvedPool(Model):
    """An accepted pool, as its ConfigMap hands it to broker and nodes."""

    name: str
    namespace: str = "default"
    uid: str
    spec: EnvPoolSpec


def read_run(path: Path) -> ResolvedRun:
    """The run that this role belongs to.

    Raises:
        UserError: the file is missing or is no valid run.
    """
    return _read(path, ResolvedRun)


def read_pool(path: Path) -> ResolvedPool:
    """The pool that this role belongs to.

    Raises:
        UserError: the file is missing or is no valid pool.
    """
    return _read(path, ResolvedPool)


def _read(path: Path, model: type[M]) -> M:
    try:
        return model.model_validate(json.loads(path.read_bytes()))
    except (OSError, ValueError) as cause:
        raise UserError(
            Problem(
                reason="InvalidSpec",
                what=f"cannot be read as {model.__name__}: {cause}",
                where=str(path),
                fix="apply a manifest that passes `etude lint`",
            )
        ) from cause


def store_for(uri: str, storage: StoreAccess) -> Store:
    """The store at uri, reached with the run's endpoint and region."""
    return open_store(uri, endpoint=storage.endpoint, region=storage.region)


def materialise(uri: str, scratch: Path, storage: StoreAccess) -> Path:
    """A local folder with the content of uri: the folder itself, or a download of the prefix.

    Raises:
        UserError: nothing is there.
        CorruptError: an object's key would leave the folder.
    """
    parts = urlparse(uri)
    if parts.scheme == "file":
        folder = Path(unquote(parts.path))
        if not folder.exists():
            raise UserError(_nothing_there(uri))
        return folder
    target = scratch / "inputs" / parts.netloc / parts.path.strip("/")
    store = store_for(uri, storage)
    found = False
    for info in store.list(""):
        relative = PurePosixPath(info.key)
        if relative.is_absolute() or ".." in relative.parts:
            raise CorruptError(f"{uri}: key {info.key!r} leaves the prefix")
        path = target / relative
        if not (path.exists() and path.stat().st_size == info.size):
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(path.name + ".partial")
            partial.write_bytes(store.get(info.key))
            partial.rename(path)
        found = True
    if not found:
        raise UserError(_nothing_there(uri))
    return target


def _nothing_there(uri: str) -> Problem:
    return Problem(
        reason="InvalidSpec",
        what="holds no files",
        where=uri,
        fix="upload the folder there, or correct the URI",
    )
