"""The client and the real service with faults between them: each event is stored exactly once."""

import asyncio
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.feedback.events import PAYLOADS, TERMS
from tests.support.feedback.lives import Stores, ids, living

from etude.common import api_keys
from etude.common.api_keys import ApiKeyFile
from etude.common.feedback.client import (
    EventAuthor,
    EventClient,
    EventContext,
    UserConsent,
)
from etude.common.feedback.http_exchange import HttpAnswer
from etude.common.feedback.spool import EventSpool
from etude.feedback.ingest import app as http

FAULTS = ["none", "lost request", "lost answer", "503", "429", "cut answer", "crash"]
KINDS = sorted(PAYLOADS.keys() - {"dryrun"})
CONSENT = UserConsent(granted=True, terms=TERMS, decided="2026-11-01T08:00:00Z")
ABOUT = EventContext("c-1", "r-1")


class CrashError(BaseException):
    """Stands for kill -9 of the client: nothing of ours handles it."""


@dataclass
class FaultyNetwork:
    """Posts to the service in this process, with faults in their order, and none after them."""

    runner: asyncio.Runner
    client: httpx.AsyncClient
    faults: Iterator[str]

    def post(self, path: str, media_type: str, body: bytes) -> HttpAnswer:
        fault = next(self.faults, "none")
        if fault == "lost request":
            raise ConnectionRefusedError
        if fault in {"503", "429"}:
            return HttpAnswer(int(fault), b"{}")
        headers = {"content-type": media_type}
        answer = self.runner.run(self.client.post(path, content=body, headers=headers))
        if fault == "crash":
            raise CrashError
        if fault == "lost answer":
            raise TimeoutError
        content = answer.content[:-9] if fault == "cut answer" else answer.content
        return HttpAnswer(answer.status_code, content)


@dataclass
class Program:
    """A client program that may be killed at any time, and starts again."""

    folder: Path
    network: FaultyNetwork
    added: list[str] = field(default_factory=list)

    def start(self) -> EventClient:
        author = EventAuthor("my-editor/1.2", "acme", "u-1")
        return EventClient(EventSpool(self.folder), self.network.post, author, CONSENT)

    def run(self, steps: Sequence[str]) -> None:
        client = self.start()
        for step in steps:
            if step == "flush":
                try:
                    client.flush(timeout_s=0.0)
                except CrashError:
                    with (self.folder / "events.jsonl").open("ab") as file:
                        file.write(b'{"id":"torn')
                    client = self.start()
            else:
                payload = PAYLOADS.get(step, {"turn": -1})
                kind = step if step in PAYLOADS else "accepted"
                self.added.append(client.add(kind, payload, ABOUT))


@given(
    steps=st.lists(st.sampled_from([*KINDS, "invalid", "flush", "flush", "flush"]), max_size=20),
    faults=st.lists(st.sampled_from(FAULTS), max_size=6),
)
@settings(max_examples=40, deadline=None)
def test_every_added_event_is_stored_once(steps: list[str], faults: list[str]) -> None:
    key, line = api_keys.make_key("u-1", "feedback")
    with tempfile.TemporaryDirectory() as name, asyncio.Runner() as runner:
        folder = Path(name)
        (folder / "keys").write_text(f"{line} tenant=acme consent={TERMS}\n")
        life = living(Stores())
        intake = runner.run(life.__aenter__())
        app = http.build_application(ApiKeyFile.load(folder / "keys"), intake)
        client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app),
            base_url="http://feedback",
            headers={"authorization": f"Bearer {key}"},
        )
        program = Program(folder / "spool", FaultyNetwork(runner, client, iter(faults)))
        program.run([*steps, *["flush"] * (len(faults) + 1)])
        assert all(program.added)
        counts = program.start().read_counts()
        invalid = steps.count("invalid")
        assert counts.waiting_bytes == 0
        assert counts.given_up == ({"400 InvalidEvent": invalid} if invalid else {})
        stored = ids(intake.ledger)
        assert len(stored) == len(set(stored)) == len(program.added) - invalid
        assert set(stored) <= set(program.added)
        runner.run(client.aclose())
        runner.run(life.__aexit__(None, None, None))
