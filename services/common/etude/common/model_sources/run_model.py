"""The model folder of a run: its URI, or the copy in the run's store of a model on a hub."""

import logging
import time
from pathlib import Path

from etude.common.api.run.spec import ModelSource
from etude.common.blobs import Store
from etude.common.errors import Problem, UserError
from etude.common.hub_uri import HubUri, is_hub_uri, parse_hub_uri
from etude.common.model_sources.hub_access import HubAccess
from etude.common.model_sources.mirror import (
    Progress,
    copy_model,
    create_pin,
    read_manifest,
    read_pin,
)
from etude.common.role_inputs import ResolvedRun
from etude.common.stores import open_run_store

log = logging.getLogger(__name__)

POLL_S = 2.0
LONGEST_COPY_S = 6 * 3600.0
"""A terabyte at 50 MB/s; a trainer that fails ends the run, and its engines, much earlier."""
LOG_EVERY_S = 60.0


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
    prefix = copy_model(model, store, scratch=scratch, progress=_log_progress(pin.source))
    return f"{store.url}/{prefix}"


def find_run_model(uri: str, store: Store) -> str | None:
    """URI of the run's model folder; None while a model on a hub is not copied.

    Raises:
        CorruptError: pin or manifest cannot be read.
        StoreError: the store does not answer.
    """
    if not is_hub_uri(uri):
        return uri
    pin = read_pin(store, uri)
    if pin is None or read_manifest(store, pin.prefix) is None:
        return None
    return f"{store.url}/{pin.prefix}"


def await_run_model(uri: str, store: Store, *, limit_s: float) -> str:
    """URI of the run's model folder, once the trainer has copied it.

    Raises:
        UserError: it is not there after the limit.
        StoreError: the store does not answer.
    """
    start_s = time.monotonic()
    logged_s = start_s
    while (folder := find_run_model(uri, store)) is None:
        now_s = time.monotonic()
        if now_s - start_s > limit_s:
            raise UserError(
                Problem(
                    reason="TimedOut",
                    what=f"is not in the run's store after {limit_s:.0f} s",
                    where=f"model.uri: {uri}",
                    fix="read the trainer's log: it copies the model; or copy it before with"
                    " `etude model import`",
                )
            )
        if now_s - logged_s > LOG_EVERY_S:
            logged_s = now_s
            log.info("%s: waiting for the trainer to copy it into the run's store", uri)
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
    folder = await_run_model(spec.model.folder, store, limit_s=limit_s)
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
