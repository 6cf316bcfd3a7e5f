"""One command erases a user and names the checkpoints that had seen the user, kills included."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.feedback import events as examples
from tests.support.feedback.lives import NOW_MS, SECRET, Stores, living, send
from tests.support.feedback.process import FeedbackProcess
from tests.support.feedback.turns import serve_version, turn, write_turns

from etude.common.blobs import Store, open_store
from etude.common.checkpoints.manifest import CheckpointManifest, describe_object, write_manifest
from etude.common.turns.turn_sealing import TurnKey, TurnSealer, derive_public_key
from etude.feedback.commands import subject
from etude.feedback.ingest.intake import EventIntake
from etude.feedback.windows.builder import WindowBuilder
from etude.feedback.windows.settings import WindowRules
from etude.trainer.controller.admission.windows import task_id
from etude.trainer.controller.checkpoints.state import ControllerState, Cursor, Figures
from etude.trainer.controller.journal.ledger import LedgerState

RULES = WindowRules(num_rollouts=3, min_rollouts=2, max_age_s=1_000, horizon_s=100.0)
ALICE = SECRET.user_id("acme", "alice")


def settled_ms() -> int:
    """A time at which what was stored just now waits for nothing."""
    return time.time_ns() // 1_000_000 + 200_000


@dataclass
class Route:
    """A route in a folder."""

    folder: Path
    stores: Stores

    @classmethod
    def make(cls, folder: Path) -> "Route":
        (folder / "secret").write_text(SECRET.master.hex())
        ledger, keys = (open_store((folder / name).as_uri()) for name in ("store", "keys"))
        return cls(folder, Stores(ledger, keys))  # type: ignore[arg-type]  # any store does

    @property
    def words(self) -> list[str]:
        names = [f"--store={self.stores.ledger.url}", f"--key-store={self.stores.keys.url}"]
        secret = f"--secret={self.folder / 'secret'}"
        return ["--tenant=acme", "--user=alice", *names, secret, "--ledger=test"]

    def report(self, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
        assert subject.main([*self.words, "--json"]) == 0
        report: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert report["damaged"] == []
        return report


def save_checkpoint(store: Store, step: int, trained: list[int]) -> None:
    """Save a checkpoint as a controller does that was given some windows."""
    consumed = [task_id(store.url, number, place=0, count=2) for number in trained]
    state = ControllerState(
        run="run-1",
        epoch=1,
        cursor=Cursor(phase="f"),
        figures=Figures(),
        ledger=LedgerState(consumed=["train/3", *consumed]),
        sequence=1,
        seeds={},
    )
    prefix, key = f"checkpoints/{step:012d}/", "000001/001/controller.json"
    store.put(prefix + key, state.model_dump_json().encode())
    manifest = CheckpointManifest(
        run="run-1",
        step=step,
        phase="f",
        phase_step=step,
        epoch=1,
        policy_version=step + 1,
        reason="Window",
        objects=[describe_object(store, prefix, key)],
    )
    write_manifest(store, manifest)


async def seal(intake: EventIntake, user: str, rollout: str) -> Any:
    record = turn(user, rollout, started_ms=NOW_MS)
    key = await intake.ledger.user_key(SECRET.user_id("acme", user))
    public = derive_public_key(key.key)
    TurnSealer.make(TurnKey(key.user.digest, key.generation, public)).seal(record)
    return record


async def serve(route: Route) -> None:
    """Let users work, and train one window of three rollouts; two more of alice wait."""
    store = route.stores.ledger
    serve_version(store)
    async with living(route.stores) as intake:
        for user in ("alice", "bob", "carol"):
            await send(intake, "shown", user)
        builder = WindowBuilder(intake.ledger, RULES, clock_ms=settled_ms)
        records = [await seal(intake, user, "r-1") for user in ("alice", "bob", "carol")]
        write_turns(store, records)
        await asyncio.to_thread(builder.run_pass)
        more = [await seal(intake, "alice", name) for name in ("r-2", "r-3")]
        write_turns(store, [*more, turn("alice", "r-3", started_ms=NOW_MS, prefix=5)])
    save_checkpoint(store, 10, [])
    save_checkpoint(store, 20, [1])
    save_checkpoint(store, 30, [1, 2])


async def build(route: Route) -> None:
    """One life of the service, with a pass of windows."""
    async with living(route.stores) as intake:
        builder = WindowBuilder(intake.ledger, RULES, clock_ms=settled_ms)
        await asyncio.to_thread(builder.run_pass)


ERASE_AND_DIE = """
import asyncio, os, signal, sys
from tests.support.feedback.lives import NOW_MS, SECRET, Stores, living
from etude.common.blobs import open_store
from etude.feedback.ledger.user_keys import UserKeys

async def main():
    stores = Stores(*map(open_store, sys.argv[1:]))
    UserKeys.destroy = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    async with living(stores) as intake:
        await intake.ledger.erase_user(SECRET.user_id("acme", "alice"), now_ms=NOW_MS)

asyncio.run(main())
"""


def test_an_erasure_that_is_killed_is_finished_and_reported_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    route = Route.make(tmp_path)
    asyncio.run(serve(route))
    before = route.report(capsys)
    counts = ("erasures", "events", "turns", "rollouts", "waiting", "stored_rollouts")
    assert [before[name] for name in counts] == [0, 1, 4, 3, 2, 1]
    assert [before[f"readable_{name}"] for name in ("events", "turns")] == [1, 4]
    seen = [(each["version"], each["windows"]) for each in before["checkpoints"]]
    assert seen == [("1.21", [1]), ("1.31", [1])]

    urls = (route.stores.ledger.url, route.stores.keys.url)
    killed = subprocess.run([sys.executable, "-c", ERASE_AND_DIE, *urls], check=False)
    assert killed.returncode == -signal.SIGKILL
    ordered = route.report(capsys)
    assert (ordered["erasures"], ordered["remaining_keys"]) == (1, 1)

    asyncio.run(build(route))
    after = route.report(capsys)
    assert after["remaining_keys"] == after["stored_rollouts"] == after["readable_events"] == 0
    # One turn was recorded in the clear: nothing reaches it, and the report says so.
    assert (after["readable_turns"], after["unencrypted_turns"]) == (1, 1)
    same = ("events", "turns", "rollouts", "waiting", "trained", "checkpoints", "user")
    assert {name: after[name] for name in same} == {name: before[name] for name in same}
    assert after["user"] == ALICE.digest


def test_a_damaged_checkpoint_is_named_as_one_that_may_have_seen_the_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    route = Route.make(tmp_path)
    asyncio.run(serve(route))
    route.stores.ledger.put("checkpoints/000000000020/000001/001/controller.json", b"{")
    assert subject.main(route.words) == 0
    told = capsys.readouterr().out
    assert "checkpoints that may have seen the user: 1" in told
    assert "damaged, and may have seen the user" in told
    assert "checkpoints/000000000020/" in told


async def delete(service: FeedbackProcess, key: str) -> tuple[int | None, str, str]:
    """Run the verb as a person does with the service's variables."""
    key_file = service.folder / "key"
    key_file.write_text(f"{key}\n")
    words = ("--tenant", "acme", "--url", service.url, "--key-file", str(key_file))
    done = await asyncio.create_subprocess_exec(
        *(Path(sys.executable).with_name("etude"), "feedback", "delete-subject", "alice", *words),
        env=service.env,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    told, errors = await done.communicate()
    return done.returncode, told.decode(), errors.decode()


async def test_the_verb_erases_at_the_service_and_says_what_that_reached(tmp_path: Path) -> None:
    service = FeedbackProcess.prepare(tmp_path)
    await service.start()
    try:
        body = json.dumps(examples.event(id="1", user="alice")).encode()
        headers = service.headers | {"content-type": "application/cloudevents+json"}
        async with httpx.AsyncClient(headers=headers, timeout=60) as client:
            answer = await client.post(f"{service.url}/v1/events", content=body)
        assert answer.status_code == 202
        code, told, errors = await delete(service, "etude_unknown")
        assert (code, told) == (4, "")
        assert "answered 401" in errors
        for times in (1, 2):
            code, told, _ = await delete(service, service.key)
            assert code == 0
            assert f"erased {times} times" in told
            assert "events: 1, of which 0 can be read" in told
    finally:
        await service.stop(signal.SIGKILL)
