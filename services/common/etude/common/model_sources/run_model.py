"""The model folder of a run: its URI, or the copy in the run's store of a model on a hub."""

import logging
import time
from pathlib import Path

from etude.common.api.run.spec import ModelSource, has_changes
from etude.common.api.storage import StoreAccess
from etude.common.blobs import Store
from etude.common.errors import CorruptError, Problem, UserError
from etude.common.hub_uri import HubUri, is_hub_uri, parse_hub_uri
from etude.common.model_sources.extended import ModelChanges, extend_model
from etude.common.model_sources.hub_access import HubAccess
from etude.common.model_sources.mirror import (
    Progress,
    copy_model,
    create_pin,
    mirror_prefix,
    read_manifest,
    read_pin,
    remove_leftovers,
)
from etude.common.model_sources.store_model import open_store_model
from etude.common.role_inputs import ResolvedRun
from etude.common.stores import open_run_store

log = logging.getLogger(__name__)

POLL_S = 2.0
LONGEST_COPY_S = 6 * 3600.0
"""A terabyte at 50 MB/s; a trainer that fails ends the run, and its engines, much earlier."""
LOG_EVERY_S = 60.0


def needs_copy(key: str) -> bool:
    """True if the model is copied into the run's store: from a hub, or with changes."""
    return is_hub_uri(key) or has_changes(key)


def mirror_run_model(uri: str, store: Store, *, scratch: Path, access: HubAccess) -> str:
    """URI of the run's model folder; a model on a hub is copied into the run's store first.

    The hub is asked once per run: the commit is pinned before the first byte, and a sealed copy
    needs no hub at all.

    Args:
        uri: as the run names it.
        store: of the run.
        scratch: folder with room for the largest file of the model.
        access: to the hub.

    Raises:
        UserError: the model is refused, or the hub refuses.
        CorruptError: content has not the promised digest.
        UnavailableError: hub or store gave no answer.
        OSError: the scratch folder cannot be written.
    """
    if not is_hub_uri(uri):
        return uri
    wanted = parse_hub_uri(uri)
    sealed = find_run_model(uri, store)
    if sealed is not None:
        remove_leftovers(scratch)
        return sealed
    # Only a run that names a model on a hub needs its client.
    from etude.common.model_sources.hub import open_hub_model  # noqa: PLC0415

    pin = read_pin(store, uri)
    if pin is None:
        model = open_hub_model(wanted, access)
        pin = create_pin(store, uri, model)
    if pin.source != HubUri(wanted.repository, wanted.revision).text():
        log.info("%s is %s for this run", uri, pin.source)
    model = open_hub_model(parse_hub_uri(pin.source), access)
    remove_leftovers(scratch, keep=pin.prefix)
    # Not where its content would be: a hub may give other digests, or a later release use other
    # files, and engines wait at the pin.
    copy_model(model, store, scratch=scratch, prefix=pin.prefix, progress=_log_progress(pin.source))
    return f"{store.url}/{pin.prefix}"


def extend_run_model(
    key: str,
    folder: str,
    changes: ModelChanges,
    store: Store,
    *,
    scratch: Path,
    access: StoreAccess,
) -> str:
    """URI of a changed copy of the run's model in its store, which is written once.

    Args:
        key: of the run's model, with the changes (`ModelSource.key`).
        folder: URI of the model of before.
        changes: further tokens and a chat template.
        store: of the run.
        scratch: folder with room for the largest file of the model.
        access: to the folder.

    Raises:
        UserError: the model cannot be changed so.
        CorruptError: a file is damaged, or the folder changed meanwhile.
        UnavailableError: the store gave no answer.
        OSError: the scratch folder cannot be written.
    """
    sealed = find_run_model(key, store)
    if sealed is not None:
        return sealed
    source = open_store_model(folder, access, with_digests=True)
    model = extend_model(source, changes)
    pin = create_pin(store, key, model)
    if pin.prefix != mirror_prefix(model):
        raise CorruptError(f"{folder}: has changed since the run began with {pin.prefix}")
    log.info("%s: a copy with %d further tokens is written", folder, len(changes.tokens))
    prefix = copy_model(model, store, scratch=scratch, progress=_log_progress(folder))
    return f"{store.url}/{prefix}"


def find_run_model(key: str, store: Store) -> str | None:
    """URI of the run's model folder; None while it is not copied or changed.

    Args:
        key: of the run's model (`ModelSource.key`).
        store: of the run.

    Raises:
        CorruptError: pin or manifest cannot be read.
        StoreError: the store does not answer.
    """
    if not needs_copy(key):
        return key
    pin = read_pin(store, key)
    if pin is None or read_manifest(store, pin.prefix) is None:
        return None
    return f"{store.url}/{pin.prefix}"


def await_run_model(key: str, store: Store, *, limit_s: float) -> str:
    """URI of the run's model folder, once the trainer has copied it.

    Raises:
        UserError: it is not there after the limit.
        StoreError: the store does not answer.
    """
    start_s = time.monotonic()
    logged_s = start_s
    while (folder := find_run_model(key, store)) is None:
        now_s = time.monotonic()
        if now_s - start_s > limit_s:
            raise UserError(
                Problem(
                    reason="TimedOut",
                    what=f"is not in the run's store after {limit_s:.0f} s",
                    where=f"model.uri: {key}",
                    fix="read the trainer's log: it copies the model; or copy it before with"
                    " `etude model import`",
                )
            )
        if now_s - logged_s > LOG_EVERY_S:
            logged_s = now_s
            log.info("%s: waiting for the trainer to copy it into the run's store", key)
        time.sleep(POLL_S)
    return folder


def with_model_folder(run: ResolvedRun, *, limit_s: float = LONGEST_COPY_S) -> ResolvedRun:
    """A run that names the copy of its model, once the trainer has made it.

    Raises:
        UserError: it is not there after the limit.
        StoreError: the store does not answer.
    """
    spec = run.spec
    store = open_run_store(spec.storage.uri, spec.storage)
    folder = await_run_model(spec.model.key, store, limit_s=limit_s)
    model = ModelSource(uri=folder, seed=spec.model.seed)
    return run.model_copy(update={"spec": spec.model_copy(update={"model": model})})


def _log_progress(source: str) -> Progress:
    logged_s = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal logged_s
        if time.monotonic() - logged_s > LOG_EVERY_S / 6:
            logged_s = time.monotonic()
            log.info("%s: %.1f of %.1f GB copied", source, done / 1e9, total / 1e9)

    return report
