"""Watch of the operator's own kinds, by kopf.

Children are watched by `etude.operator.kube.watches` instead, which resumes after an error; kopf
lists everything again (ADR 6).
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kopf
from typing_extensions import override

from etude.common.api.meta import GROUP, VERSION
from etude.common.backoff import Backoff
from etude.operator.manifests import OWN_KINDS, RESOURCES, Manifest

SERVER_TIMEOUT_S = 300
"""An integer: kopf sends it as it is, and the API server refuses 300.0."""
CLIENT_TIMEOUT_S = 330

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0
CANCEL_EVERY_S = 1.0
"""Interval at which tasks of kopf that do not end are cancelled again."""
PAUSE_WAITER = "pause-waiter for "
"""Start of the names of kopf's tasks that end when a watch is to pause."""

log = logging.getLogger(__name__)

EventHandler = Callable[[str, Manifest], None]
"""Receives ADDED, MODIFIED or DELETED, and the object."""


async def watch_own_kinds(
    observe: EventHandler, *, namespaces: tuple[str, ...], kubeconfig: Path | None
) -> None:
    """Watch every object of the operator's kinds until cancelled.

    kopf ends at transient answers: an API server that still forbids everything, a resource version
    that is too old, a truncated event. It is started again, with backoff, and lists everything;
    the periodic check of all watches finds deletions in between.
    """
    loop = asyncio.get_running_loop()
    backoff = Backoff(FIRST_DELAY_S, LONGEST_DELAY_S)
    while True:
        began_s = loop.time()
        why = await _watch_once(observe, namespaces, kubeconfig)
        if loop.time() - began_s > LONGEST_DELAY_S:
            backoff.reset()
        delay_s = backoff.next_s()
        log.warning("the kopf watch ended: %s; restarts in %.1f s", why, delay_s)
        await asyncio.sleep(delay_s)


async def _watch_once(
    observe: EventHandler, namespaces: tuple[str, ...], kubeconfig: Path | None
) -> str:
    """Watch until kopf ends without being stopped; returns the reason.

    kopf runs in a thread with its own event loop: it takes the signal handlers and stops every
    task of the loop that it runs in.
    """
    loop = asyncio.get_running_loop()

    def tell(kind: str, manifest: Manifest) -> None:
        loop.call_soon_threadsafe(observe, kind, manifest)

    logging.getLogger("kopf").setLevel(logging.WARNING)
    # It warns that it cannot handle signals in a thread, which is intended.
    logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)
    watcher = _KopfThread(registry=_registry(tell, kubeconfig), namespaces=namespaces)
    try:
        await asyncio.to_thread(watcher.run)
    except Exception as error:  # noqa: BLE001 - kopf names no errors of its own
        return repr(error)
    finally:
        watcher.stop()
    return "kopf stopped"


@dataclass(slots=True, kw_only=True)
class _KopfThread:
    """One kopf in a thread."""

    registry: Any
    namespaces: tuple[str, ...]
    _loop: asyncio.AbstractEventLoop | None = None
    # Not a threading.Event: kopf waits for one in a thread that cannot be cancelled, and would
    # never end after its own error.
    _stop: asyncio.Event = field(default_factory=asyncio.Event)

    def run(self) -> None:
        asyncio.run(self._watch())

    def stop(self) -> None:
        """Ask it to end; may be called from any thread."""
        if self._loop is None or self._loop.is_closed():
            self._stop.set()
        else:
            self._loop.call_soon_threadsafe(self._stop.set)

    async def _watch(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(_drop_unretrieved)
        tasks = await kopf.spawn_tasks(
            registry=self.registry,
            settings=_settings(),
            standalone=True,  # without peering: two kopfs of equal priority freeze each other
            identity="etude",  # by default the user's name, and a pod's user has none
            clusterwide=not self.namespaces,
            namespaces=list(self.namespaces),
            stop_flag=self._stop,
        )
        # Not kopf.run_tasks(): after the first task ends it cancels the others once, and waits
        # forever for one that swallowed the cancellation while it retried a request.
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        await _cancel_all()
        for task in ended:
            task.result()


def _drop_unretrieved(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Drop exceptions of kopf tasks that are never retrieved: kopf has logged them."""
    if context.get("message") != "Task exception was never retrieved":
        loop.default_exception_handler(context)


async def _cancel_all() -> None:
    """Cancel all tasks but this one until they have ended.

    Pause-waiters come last: a watch whose waiter has ended takes its own cancellation for a pause,
    and starts again with another waiter, as often as both are cancelled together.
    """
    me = asyncio.current_task()
    while others := asyncio.all_tasks() - {me}:
        watches = {task for task in others if not task.get_name().startswith(PAUSE_WAITER)}
        for task in watches or others:
            task.cancel()
        await asyncio.wait(watches or others, timeout=CANCEL_EVERY_S)


def _registry(tell: EventHandler, kubeconfig: Path | None) -> Any:  # noqa: ANN401 - kopf is untyped here
    registry = kopf.OperatorRegistry()

    async def handle(event: Any, **_: Any) -> None:  # noqa: ANN401 - as above
        # The first list of a watch has no type.
        tell(event["type"] or "ADDED", dict(event["object"]))

    def login(settings: Any, **_: Any) -> Any:  # noqa: ANN401 - as above
        if kubeconfig is None:
            return kopf.login_with_service_account(settings=settings)
        return kopf.login_with_kubeconfig(settings=settings)

    for kind in OWN_KINDS:
        on_event = kopf.on.event(GROUP, VERSION, RESOURCES[kind].plural, registry=registry)
        on_event(handle)
    kopf.on.login(registry=registry)(login)
    return registry


def _settings() -> Any:  # noqa: ANN401 - kopf is untyped here
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.watching.server_timeout = SERVER_TIMEOUT_S
    settings.watching.client_timeout = CLIENT_TIMEOUT_S
    settings.persistence.diffbase_storage = _NoDiff()
    return settings


class _NoDiff(kopf.DiffBaseStorage):  # type: ignore[misc] # kopf is untyped here
    """Disables kopf's diffs, which copy every object twice; no handler here uses them."""

    @override
    def build(self, **_: Any) -> Any:
        return {}

    @override
    def fetch(self, **_: Any) -> None:
        return None

    @override
    def store(self, **_: Any) -> None:
        """Store nothing."""
