"""Processes that serve a route: engines, gateway, feedback service, and the keys of its users."""

import asyncio
import contextlib
import json
import os
import sys
import time
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from etude.common import api_keys
from etude.common.errors import Problem, UserError
from etude.feedback.ledger.user_keys import LedgerSecret
from etude.operator.local.child_process import ChildProcess
from etude.operator.local.ports import LOOPBACK, PortRegistry

MODEL = "realtime"
"""Name by which clients ask for the policy."""
MANUAL: Mapping[str, object] = {"policy": "Manual", "intervalSeconds": 1}
"""Rules of releases: the demo promotes, and a freeze is seen at once."""
TENANT, TERMS = "acme", "2026-11"
START_S = 300.0
"""An engine imports for half a minute on idle cores."""
STOP_S = 60.0
_LOOK_S = 0.1
_REQUESTS = "etude_gateway_requests_total"
_WAITING = "etude_feedback_waiting_rollouts"
_CANARY_SHARE = "etude_gateway_canary_share"
_FROZEN = "etude_feedback_release_frozen"
_LIMIT = 10_000_000
"""Requests and events a minute of one key: users of a simulation work at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteKeys:
    """API keys of a route."""

    users: Mapping[str, str]
    """Key of each user, for requests and events."""
    backend: str
    """Reads all events, and decides about releases."""


def make_keys(file: Path, consenting: Sequence[str], refusing: Sequence[str] = ()) -> RouteKeys:
    """Make keys of users who agreed to the terms, of others, and of the product's server."""
    lines, keys = [], {}
    for user in (*consenting, *refusing):
        keys[user], line = api_keys.make_key(user, "serve,feedback")
        consent = "" if user in set(refusing) else f" consent={TERMS}"
        lines.append(f"{line} tenant={TENANT} limit={_LIMIT}{consent}")
    backend, line = api_keys.make_key("backend", "export,admin")
    lines.append(f"{line} tenant={TENANT} limit={_LIMIT} consent={TERMS}")
    file.write_text("\n".join(lines) + "\n")
    file.chmod(0o600)
    return RouteKeys(users=keys, backend=backend)


@dataclass(slots=True)
class RouteProcesses:
    """Engines, gateway and feedback service of one route, in a folder."""

    folder: Path
    store: str
    """URI of the route's store, which is the run's."""
    _ports: PortRegistry = field(default_factory=PortRegistry)
    _running: dict[str, ChildProcess] = field(default_factory=dict)

    @property
    def gateway_url(self) -> str:
        return f"http://{LOOPBACK}:{self._ports.port('gateway', 0)}"

    @property
    def feedback_url(self) -> str:
        return f"http://{LOOPBACK}:{self._ports.port('feedback', 0)}"

    @property
    def release_address(self) -> str:
        return f"{LOOPBACK}:{self._ports.port('feedback', 2)}"

    @property
    def keys_file(self) -> Path:
        return self.folder / "keys"

    async def start_engine(
        self, channel: str, run: Mapping[str, object], *, serves_later: bool = False
    ) -> str:
        """Start an engine that follows a channel, and return its address.

        Args:
            channel: its name.
            run: name, uid and spec, as the operator mounts them.
            serves_later: return before it is ready: the channel serves nothing yet.

        Raises:
            UserError: it did not become ready in time.
        """
        name = f"engine-{channel}"
        run_file = self.folder / f"{name}.json"
        run_file.write_text(json.dumps(run))
        settings = {
            "ETUDE_RUN_FILE": str(run_file),
            "ETUDE_SCRATCH": str(self.folder / f"{name}-scratch"),
            "ETUDE_HTTP_PORT": str(self._ports.port(name, 2)),
            "ETUDE_POD": name,
            "ETUDE_CHANNEL": channel,
        }
        self._launch(name, "etude.inference.main", settings)
        if not serves_later:
            await self._await_ready(name)
        return f"{LOOPBACK}:{self._ports.port(name, 0)}"

    async def start_gateway(self, model_uri: str, engines: Mapping[str, Sequence[str]]) -> None:
        """Start the gateway.

        Args:
            model_uri: folder with tokenizer and chat template.
            engines: addresses of the engines of each channel.

        Raises:
            UserError: it did not become ready in time.
        """
        route = {
            "model": MODEL,
            "modelUri": model_uri,
            **engines,
            "channels": {"uri": self.store},
            "storage": {"uri": self.store},
            "feedback": self.release_address,
        }
        file = self.folder / "route.json"
        file.write_text(json.dumps(route))
        settings = {
            "ETUDE_GATEWAY_ROUTE": str(file),
            "ETUDE_GATEWAY_KEYS": str(self.keys_file),
            "ETUDE_SCRATCH": str(self.folder / "scratch"),
        }
        await self._start("gateway", "etude.gateway.main", settings)

    async def start_feedback(
        self, settings: Mapping[str, str], rules: Mapping[str, object] = MANUAL
    ) -> None:
        """Start the feedback service.

        Args:
            settings: sizes and times of windows.
            rules: of releases.

        Raises:
            UserError: it did not become ready in time.
        """
        secret = self.folder / "secret"
        if not secret.exists():
            secret.write_text(os.urandom(32).hex())
        rules_file = self.folder / "release.json"
        rules_file.write_text(json.dumps(rules))
        fixed = {
            "ETUDE_FEEDBACK_RELEASE": str(rules_file),
            "ETUDE_FEEDBACK_RELEASE_PORT": str(self._ports.port("feedback", 2)),
            "ETUDE_FEEDBACK_STORE": self.store,
            "ETUDE_FEEDBACK_KEY_STORE": (self.folder / "user-keys").resolve().as_uri(),
            "ETUDE_FEEDBACK_SECRET_FILE": str(secret),
            "ETUDE_FEEDBACK_API_KEYS": str(self.keys_file),
        }
        await self._start("feedback", "etude.feedback.main", {**fixed, **settings})

    def name_users(self, users: Iterable[str]) -> set[str]:
        """Names of users in the ledger and in sealed turns."""
        secret = LedgerSecret.read(self.folder / "secret")
        return {secret.user_id(TENANT, user).digest for user in users}

    def count_requests(self) -> int:
        """Requests that the gateway has answered or refused since its start."""
        return self._sum_metric("gateway", _REQUESTS)

    def count_waiting(self) -> int:
        """Served rollouts that the feedback service keeps for a later window."""
        return self._sum_metric("feedback", _WAITING)

    def read_canary_share(self) -> int:
        """Share of users whom the gateway sends to the canary, in 10,000ths of all."""
        return self._sum_metric("gateway", _CANARY_SHARE)

    def _sum_metric(self, process: str, name: str) -> int:
        address = f"http://{LOOPBACK}:{self._ports.port(process, 1)}/metrics"
        with urllib.request.urlopen(address, timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        values = [line.split()[-1] for line in lines if line.startswith((f"{name}{{", f"{name} "))]
        return round(sum(map(float, values)))

    def is_frozen(self) -> bool:
        """True if the feedback service makes roll-backs alone."""
        return self._sum_metric("feedback", _FROZEN) > 0

    async def stop(self) -> None:
        """Stop all, as Kubernetes does; what they queued is durable then."""
        for name in [*self._running][::-1]:
            await self.stop_process(name)

    async def stop_process(self, name: str) -> None:
        """Stop one that runs."""
        process = self._running.pop(name)
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_S)
        except TimeoutError:
            process.kill()

    async def await_engine(self, channel: str) -> None:
        """Wait until an engine that was started to serve later is ready.

        Raises:
            UserError: it did not become ready in time.
        """
        await self._await_ready(f"engine-{channel}")

    async def _start(self, name: str, module: str, settings: Mapping[str, str]) -> None:
        """Start a process, and wait until it answers.

        Raises:
            UserError: it did not.
        """
        self._launch(name, module, settings)
        await self._await_ready(name)

    def _launch(self, name: str, module: str, settings: Mapping[str, str]) -> None:
        probe_port = self._ports.port(name, 1)
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "ETUDE_PORT": str(self._ports.port(name, 0)),
            "ETUDE_PROBE_PORT": str(probe_port),
            **settings,
        }
        command = [sys.executable, "-m", module]
        log = self.folder / f"{name}.log"
        process = ChildProcess.start(command, env=env, folder=self.folder, log=log)
        self._running[name] = process

    async def _await_ready(self, name: str) -> None:
        process, probe_port = self._running[name], self._ports.port(name, 1)
        deadline_s = time.monotonic() + START_S
        while not await asyncio.to_thread(is_ready, probe_port):
            if time.monotonic() > deadline_s:
                what = f"did not become ready in {START_S:.0f} s: {process.log_tail()}"
                raise UserError(Problem("Unreachable", what, name, f"see {name}.log"))
            await asyncio.sleep(_LOOK_S)


def is_ready(probe_port: int) -> bool:
    """True if a service says that it is ready."""
    with contextlib.suppress(OSError):
        address = f"http://{LOOPBACK}:{probe_port}/readyz"
        with urllib.request.urlopen(address, timeout=5) as answer:
            return bool(answer.status == 200)
    return False
