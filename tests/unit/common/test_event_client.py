"""The client of feedback events, by the cases that its TypeScript twin passes too."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from etude.common import atomic
from etude.common.feedback import spool
from etude.common.feedback.client import (
    EventAuthor,
    EventClient,
    EventContext,
    UserConsent,
    count_alive_lines,
    hash_lines,
    make_event,
)
from etude.common.feedback.events import parse_event
from etude.common.feedback.http_exchange import HttpAnswer, check_address
from etude.common.feedback.spool import EventSpool

CASES = json.loads((Path(__file__).parents[3] / "clients/conformance/events.json").read_text())
AUTHOR = EventAuthor("my-editor/1.2", "acme", "u-1")
CONSENT = UserConsent(granted=True, terms="2026-11", decided="2026-11-01T08:00:00Z")
ABOUT = EventContext("c-1", "r-1")


def by_name(cases: Sequence[Mapping[str, Any]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.get("name"))


def refuse_to_post(path: str, media_type: str, body: bytes) -> HttpAnswer:
    raise AssertionError((path, media_type, body))


def make_client(
    folder: Path, post: Any = refuse_to_post, consent: UserConsent | None = CONSENT, **spool: int
) -> EventClient:
    numbers = iter(range(1, 1_000_000))
    return EventClient(
        EventSpool(folder, **spool),
        post,
        AUTHOR,
        consent,
        make_id=lambda: f"e-{next(numbers)}",
        monotonic=lambda: 0.0,
    )


def add(client: EventClient, number: int = 1) -> list[str]:
    return [client.add("accepted", {"turn": turn}, ABOUT) for turn in range(number)]


def waiting(client: EventClient) -> list[str]:
    lines = client.spool.read_batch(max_events=1_000, max_bytes=1 << 30).lines
    return [json.loads(line)["id"] for line in lines]


def play(answers: Sequence[Mapping[str, Any]], requests: list[list[str]]) -> Callable[..., Any]:
    """Answers in order, and keep the ids of each request."""
    left = iter(answers)

    def post(path: str, media_type: str, body: bytes) -> HttpAnswer:
        assert (path, media_type) == ("/v1/events", "application/cloudevents-batch+json")
        ids = [event["id"] for event in json.loads(body)]
        requests.append(ids)
        answer = next(left)
        if answer.get("isLost"):
            raise ConnectionResetError
        results = [
            {"id": event_id, "status": status, "reason": reason, "message": ""}
            for event_id, (status, reason) in zip(ids, answer.get("results", ()), strict=False)
        ]
        text = answer.get("body") or json.dumps({"results": results})
        return HttpAnswer(answer["status"], text.encode(), float(answer.get("retryAfter", "0")))

    return post


@by_name(CASES["exchanges"])
def test_a_flush_sends_keeps_and_gives_up(tmp_path: Path, case: Mapping[str, Any]) -> None:
    requests: list[list[str]] = []
    client = make_client(tmp_path, play(case["answers"], requests))
    add(client, case["events"])
    reports = [client.flush(timeout_s=0.0) for _ in range(case["flushes"])]
    assert requests == [[f"e-{number}" for number in ids] for ids in case["requests"]]
    counts = client.read_counts()
    assert (counts.num_sent, counts.given_up) == (case["sent"], case["givenUp"])
    assert waiting(client) == [f"e-{number}" for number in case["waiting"]]
    assert bool(reports[-1].problem) == bool(case["waiting"])
    assert sum(report.num_sent for report in reports) == case["sent"]


@by_name(CASES["events"])
def test_an_event_has_the_form_that_the_service_reads(case: Mapping[str, Any]) -> None:
    consent = case["consent"]
    names = {"policyVersion": "policy_version"}
    event = make_event(
        case["kind"],
        case["payload"],
        EventContext(**{names.get(key, key): value for key, value in case["about"].items()}),
        EventAuthor(**case["author"]),
        UserConsent(consent["granted"], consent["policyVersion"], consent["at"]),
        event_id=case["id"],
        time=datetime.fromisoformat(case["time"]),
    )
    assert event == case["event"]
    assert parse_event(json.dumps(event).encode()).kind == case["kind"]


@by_name(CASES["lineHashes"])
def test_lines_of_an_edit_are_hashed_by_the_clients_secret(case: Mapping[str, Any]) -> None:
    assert hash_lines(bytes.fromhex(case["secret"]), case["lines"]) == case["hashes"]


@by_name(CASES["aliveLines"])
def test_lines_that_a_file_still_has_are_counted(case: Mapping[str, Any]) -> None:
    secret = bytes.fromhex(case["secret"])
    assert count_alive_lines(secret, case["hashes"], case["text"]) == case["alive"]


@by_name(CASES["addresses"])
def test_a_key_is_sent_only_where_nobody_can_read_it(case: Mapping[str, Any]) -> None:
    if case["isAllowed"]:
        check_address(case["url"])
    else:
        with pytest.raises(ValueError, match="https://"):
            check_address(case["url"])


@pytest.mark.parametrize("consent", [None, CONSENT._replace(granted=False)])
def test_without_consent_nothing_is_written_and_nothing_is_sent(
    tmp_path: Path, consent: UserConsent | None
) -> None:
    client = make_client(tmp_path / "spool", consent=consent)
    assert add(client) == [""]
    assert not (tmp_path / "spool").exists()
    assert client.flush().problem == ""


def test_a_full_spool_and_a_large_event_are_refused_and_counted(tmp_path: Path) -> None:
    client = make_client(tmp_path, max_bytes=700)
    kept = add(client, 9)
    assert kept == [*kept[:2], *[""] * 7]
    assert client.add("followup", {"text": "x" * (256 << 10)}, ABOUT) == ""
    assert waiting(client) == kept[:2]
    assert client.read_counts().given_up == {"SpoolFull": 7, "TooLarge": 1}


def test_a_spool_that_is_never_empty_does_not_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "COMPACT_BYTES", 100)
    events = EventSpool(tmp_path, max_bytes=200)
    sent: list[bytes] = []
    for number in range(100):
        assert events.append(b"%025d" % number)
        if number >= 3:
            batch = events.read_batch(max_events=1, max_bytes=1_000)
            sent += batch.lines
            events.commit(batch, num_sent=1, given_up={})
        assert (tmp_path / "events.jsonl").stat().st_size <= 100 + 2 * 200
    assert sent == [b"%025d" % number for number in range(97)]
    assert events.read_counts() == (3 * 26, 97, {})


@pytest.mark.parametrize("num_writes", [0, 1, 2])
def test_a_kill_while_a_spool_is_compacted_loses_no_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_writes: int
) -> None:
    monkeypatch.setattr(spool, "COMPACT_BYTES", 100)
    events = EventSpool(tmp_path)
    lines = [b"%025d" % number for number in range(10)]
    for line in lines:
        events.append(line)
    batch = events.read_batch(max_events=7, max_bytes=1_000)
    left, write = iter(range(num_writes)), atomic.write_bytes

    def write_or_die(*arguments: Any, **options: Any) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        write(*arguments, **options)

    with monkeypatch.context() as dying:
        dying.setattr(atomic, "write_bytes", write_or_die)
        with pytest.raises(KeyboardInterrupt):
            events.commit(batch, num_sent=7, given_up={})
    events.append(b"new")
    found = events.read_batch(max_events=100, max_bytes=10_000).lines
    assert found[-4:] == [*lines[7:], b"new"]
    assert found == [*lines, b"new"][len(lines) + 1 - len(found) :]
    assert events.read_counts().num_sent == (7 if num_writes else 0)


def test_what_waits_is_forgotten_when_the_consent_is_taken_back(tmp_path: Path) -> None:
    posted: list[tuple[str, Any]] = []

    def post(path: str, media_type: str, body: bytes) -> HttpAnswer:
        posted.append((path, json.loads(body)["user"]))
        return HttpAnswer(202, b"{}")

    client = make_client(tmp_path, post)
    add(client, 2)
    assert client.revoke() == 2
    assert posted == [("/v1/revocations", "u-1")]
    assert (waiting(client), add(client)) == ([], [""])


def test_two_processes_share_a_folder_and_lose_nothing(tmp_path: Path) -> None:
    requests: list[list[str]] = []
    answer = {"status": 200, "results": [[202, "Stored"]] * 9}

    def post(path: str, media_type: str, body: bytes) -> HttpAnswer:
        # Meanwhile the other sends the same, and adds an event.
        if len(requests) == 0:
            requests.append([])
            other = make_client(tmp_path, play([answer], requests))
            other.flush(timeout_s=0.0)
            other.make_id = lambda: "late"
            add(other)
        send: HttpAnswer = play([answer], requests)(path, media_type, body)
        return send

    client = make_client(tmp_path, post)
    add(client, 2)
    client.flush(timeout_s=0.0)
    assert requests == [[], ["e-1", "e-2"], ["e-1", "e-2"], ["late"]]
    assert client.read_counts().waiting_bytes == 0


_ADDER = """
import sys
from pathlib import Path
from etude.common.feedback.spool import EventSpool
spool = EventSpool(Path(sys.argv[1]))
number = 0
while True:
    number += 1
    spool.append(b'{"id":"%d"}' % number)
    print(number, flush=True)
"""


def test_a_killed_process_leaves_every_event_that_was_added(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _ADDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    added = [process.stdout.readline().strip() for _ in range(30)]
    process.kill()
    added += process.stdout.read().split("\n")[:-1]
    process.wait()
    found = waiting(make_client(tmp_path))
    assert found[: len(added)] == added
    assert len(found) <= len(added) + 1


def test_the_client_needs_the_standard_library_alone() -> None:
    code = (
        "import sys, etude.common.feedback.client;"
        "sys.exit(bool({'pydantic', 'grpc', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
