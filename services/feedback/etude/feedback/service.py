"""The feedback service's process: wiring, serving, draining."""

import asyncio
import os
import resource
import socket
import sys
from collections.abc import Coroutine, Iterator, Sequence
from typing import NoReturn

from etude.common import process
from etude.common.api_keys import ApiKeyFile
from etude.common.blobs import StoreRefusedError, probe
from etude.common.errors import EtudeError, FencedError
from etude.common.http_server import HttpServer, http_config, open_listener, require_tls
from etude.common.probes import Probes
from etude.common.store_retry import StoreRetry
from etude.common.stores import open_run_store
from etude.feedback.clock import LedgerClock
from etude.feedback.ingest.app import build_application
from etude.feedback.ingest.intake import EventIntake
from etude.feedback.ingest.publish import FeedbackService
from etude.feedback.ledger.ledger import FeedbackLedger, open_ledger
from etude.feedback.ledger.user_keys import LedgerSecret
from etude.feedback.passes import LARGEST_SHARE, repeat_passes
from etude.feedback.release.rules import read_rules
from etude.feedback.release.server import ReleaseServer
from etude.feedback.settings import Settings
from etude.feedback.tables.writer import TableWriter
from etude.feedback.turn_removal import TurnRemoval, choose_retention_s
from etude.feedback.windows.builder import WindowBuilder


async def serve(settings: Settings) -> None:
    """Take events until SIGTERM; exit with 1 if another service took the ledger over."""
    require_tls(settings.host, settings.port, settings.tls_folder, "what users send")
    # A core would hold the text of events before they are redacted.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    keys = ApiKeyFile.load(settings.keys_file)
    secret = LedgerSecret.read(settings.secret_file)
    retention_s = _choose_retention_s(settings)
    probes = Probes(settings.probe_port, settings.host)
    stop = asyncio.Event()
    with open_listener(settings.host, settings.port) as listener, process.shutdown_signals(stop):
        await probes.start()
        ledger = await _open_patiently(settings, secret, stop)
        if ledger is None:
            await probes.stop()
            return
        intake = EventIntake(ledger)
        app = build_application(keys, intake)
        server = HttpServer(http_config(app, tls_folder=settings.tls_folder))
        tasks = [_end_if_fenced(each) for each in _passes(settings, ledger, retention_s, stop)]
        if settings.release is not None:
            events = FeedbackService(keys, intake)
            releases = await ReleaseServer.start(settings.release, ledger, keys, events)
            tasks.append(_end_if_fenced(releases.run(stop)))
        await _serve_until(stop, ledger, tasks, (server, listener), probes)
        await probes.stop()


def _choose_retention_s(settings: Settings) -> int:
    """Time for which turns are kept, as the rules of releases need it too."""
    release = settings.release
    canary_s = read_rules(release.rules_file).canary.max_seconds if release else 0
    return choose_retention_s(settings.turn_retention_s, settings.windows, canary_s)


def _passes(
    settings: Settings, ledger: FeedbackLedger, retention_s: int, stop: asyncio.Event
) -> Iterator[Coroutine[None, None, None]]:
    rules, clock_ms = settings.windows, LedgerClock(0).now_ms
    builder = WindowBuilder(ledger, rules, clock_ms=clock_ms, is_stopping=stop.is_set)
    yield repeat_passes(builder.run_pass, stop, wait_s=rules.pass_interval_s, what="windows")
    removal = TurnRemoval(ledger, retention_s, clock_ms)
    wait_s = removal.interval_s
    yield repeat_passes(
        removal.run_pass, stop, wait_s=wait_s, what="removal of turns", share=LARGEST_SHARE
    )
    if settings.tables_s:
        writer = TableWriter(ledger, rules, clock_ms=clock_ms, is_stopping=stop.is_set)
        yield repeat_passes(writer.run_pass, stop, wait_s=settings.tables_s, what="tables")


async def _serve_until(
    stop: asyncio.Event,
    ledger: FeedbackLedger,
    tasks: Sequence[Coroutine[None, None, None]],
    http: tuple[HttpServer, socket.socket],
    probes: Probes,
) -> None:
    server, listener = http
    async with asyncio.TaskGroup() as group:
        writing = group.create_task(_write(ledger), name="ledger")
        serving = group.create_task(server.serve(sockets=[listener]), name="http")
        await ledger.wait_durable(ledger.log.last_sequence)
        running = [group.create_task(task) for task in tasks]
        probes.ready = True
        await stop.wait()
        probes.ready = False
        server.should_exit = True
        await serving
        await asyncio.wait(running)
        await ledger.wait_durable(ledger.log.last_sequence)
        writing.cancel()


async def _write(ledger: FeedbackLedger) -> None:
    """Write the ledger; end the process if it cannot be written any more."""
    try:
        await ledger.log.run()
    except EtudeError as error:
        _end_process(error)


async def _end_if_fenced(task: Coroutine[None, None, None]) -> None:
    """Run a task; end the process if another service does the same work."""
    try:
        await task
    except FencedError as error:
        _end_process(error)


def _end_process(error: EtudeError) -> NoReturn:
    # At once: no request that waits for the ledger or for a decision may be answered.
    sys.stderr.write(f"etude-feedback: {error}\n")
    sys.stderr.flush()
    os._exit(1)


async def _open_patiently(
    settings: Settings, secret: LedgerSecret, stop: asyncio.Event
) -> FeedbackLedger | None:
    """Open the ledger once its stores answer; None if told to stop before.

    Raises:
        StoreRefusedError: a store answered that it never will.
    """

    def try_to_open() -> FeedbackLedger | StoreRefusedError:
        try:
            return _open(settings, secret)
        except StoreRefusedError as error:
            return error

    opening = asyncio.ensure_future(
        StoreRetry().retry("opening the ledger", lambda: asyncio.to_thread(try_to_open))
    )
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait({opening, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not opening.done():
        opening.cancel()
        return None
    opened = opening.result()
    if isinstance(opened, StoreRefusedError):
        raise opened
    return opened


def _open(settings: Settings, secret: LedgerSecret) -> FeedbackLedger:
    store = open_run_store(settings.store, settings.access)
    key_store = open_run_store(settings.key_store, settings.access)
    probe(store)
    probe(key_store)
    return open_ledger(store, key_store, secret, uid=settings.ledger, holder=socket.gethostname())
