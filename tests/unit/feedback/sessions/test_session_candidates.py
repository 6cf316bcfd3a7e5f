"""Sessions as candidates for tasks: what is listed of each, and the reasons that refuse it."""

import asyncio
from pathlib import Path

import pytest
from tests.support.feedback.lives import NOW_MS, SECRET, Stores, living
from tests.support.feedback.sessions import (
    FIXED,
    REQUEST,
    make_repository,
    send,
    serve_request,
)
from tests.support.feedback.turns import turn, write_turns

from etude.agent.chat import ChatFormat
from etude.common.blobs import MemoryStore
from etude.common.errors import UserError
from etude.common.turns.turn_log import identify_rollout
from etude.demo import corpus, model_folder, tokenizer
from etude.demo.problems import Source
from etude.feedback.ledger.reading import LedgerReader
from etude.feedback.ledger.user_keys import UserId
from etude.feedback.sessions import review as reviews
from etude.feedback.sessions import task_records
from etude.feedback.sessions.candidates import CandidateOptions, SessionFinder, find_user_refusals
from etude.feedback.sessions.review import SessionReview
from etude.feedback.sessions.task_records import RecordedTask, TaskRecord

TERMS = "2026-11"


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    folder = tmp_path_factory.mktemp("model")
    shown = corpus.demonstrate_all(Source(1).take("traces", 10), 1)
    texts = [text for each in shown for text in corpus.transcript_texts(each.messages)]
    model_folder.write(folder, tokenizer.train([*texts, REQUEST, "⟦⟧"]))
    return ChatFormat.load(folder)


def find(
    stores: Stores, chat: ChatFormat | None = None, *, terms: str = TERMS, limit: int = 9
) -> SessionReview:
    ledger = LedgerReader.open(stores.ledger, stores.keys, SECRET, uid="test")
    options = CandidateOptions(tenant="acme", terms=(terms,), limit=limit)
    return SessionFinder(stores.ledger, ledger, chat, options).find()


def test_what_a_user_kept_becomes_a_candidate_with_its_request_and_proposed_tests(
    chat: ChatFormat, tmp_path: Path
) -> None:
    _, patch = make_repository(tmp_path / "shop")
    stores = Stores()

    async def record() -> None:
        async with living(stores) as intake:
            await send(intake, "demonstration", "u", text=patch)
            serve_request(stores.ledger, chat, "u")

    asyncio.run(record())
    found = find(stores, chat)
    (entry,) = found.sessions
    assert (entry.request, entry.refusals, entry.accepted) == (REQUEST, [], False)
    assert FIXED.splitlines()[-1] in entry.reference
    assert "test_shop" not in entry.reference
    assert "+def test_sums" in entry.tests
    assert find(stores).sessions[0].refusals == ["NoRequest"], "nothing tells it without a model"


def test_a_review_that_was_written_reads_back_the_same(chat: ChatFormat, tmp_path: Path) -> None:
    _, patch = make_repository(tmp_path / "shop")
    stores = Stores()

    async def record() -> None:
        async with living(stores) as intake:
            await send(intake, "demonstration", "u", text=patch)
            serve_request(stores.ledger, chat, "u")

    asyncio.run(record())
    found, path = find(stores, chat), tmp_path / "review.yaml"
    reviews.write_review(path, found)
    assert reviews.read_review(path) == found
    assert "  reference: |\n    diff --git" in path.read_text(), "people edit it as a block"
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(UserError, match="exists already"):
        reviews.write_review(path, found)
    path.write_text(path.read_text().replace("accepted: false", "accepted: perhaps"))
    with pytest.raises(UserError, match=r"sessions\.0\.accepted"):
        reviews.read_review(path)


def test_each_session_that_is_no_candidate_has_its_reason(chat: ChatFormat, tmp_path: Path) -> None:
    _, patch = make_repository(tmp_path / "shop")
    stores, users = Stores(), ("erased", "other", "reverted", "talked", "long", "secret", "kept")

    async def record() -> None:
        async with living(stores) as intake:
            for user in users:
                text = f"{REQUEST} {REQUEST * 7}" if user == "long" else REQUEST
                if user == "secret":
                    text = "The token is ghp_" + "a1B2" * 9
                serve_request(stores.ledger, chat, user, text)
                if user != "talked":
                    await send(intake, "demonstration", user, text=patch)
            await send(intake, "task_closed", "reverted", outcome="Reverted")
            await send(intake, "shown", "talked")
            await intake.ledger.erase_user(SECRET.user_id("acme", "erased"), now_ms=NOW_MS)
            key = SECRET.user_id("acme", "other")
            consent = intake.ledger.state.consents[key]._replace(policy_version="2025-01")
            await intake.ledger.wait_durable(
                intake.ledger.append_consent(key, consent, now_ms=NOW_MS)
            )

    asyncio.run(record())
    found = find(stores, chat)
    names = {identify_rollout("acme", user, "r-1"): user for user in users}
    reasons = {names[each.session]: each.refusals for each in found.refused}
    reasons |= {names[each.session]: each.refusals for each in found.sessions}
    assert reasons == {
        "erased": ["Erased"],
        "other": ["NoConsentForTasks"],
        "reverted": ["NoReference"],
        "talked": ["NoReference"],
        "long": ["RequestTooLong"],
        "secret": ["SecretsFound"],
        "kept": [],
    }
    assert not any("ghp_" in each.request for each in found.sessions)
    assert len(find(stores, chat, limit=1).sessions) == 1
    everyone = find(stores, chat, terms="2027-01")
    assert not everyone.sessions, "no terms that anyone agreed to allow tasks"


def test_edits_are_a_reference_only_if_all_their_lines_survived(
    chat: ChatFormat, tmp_path: Path
) -> None:
    _, patch = make_repository(tmp_path / "shop")
    stores = Stores()

    async def record() -> None:
        async with living(stores) as intake:
            for user, alive in (("whole", [1, 2]), ("partly", [2, 1]), ("unseen", [])):
                serve_request(stores.ledger, chat, user)
                await send(intake, "edit_applied", user, diff=patch)
                for number, lines in enumerate(alive):
                    name = str(number)
                    await send(intake, "edit_observed", user, name, numAliveLines=lines)
                await send(intake, "edit_observed", user, "gone", isFileSeen=False)

    asyncio.run(record())
    found = find(stores, chat)
    (entry,) = found.sessions
    assert entry.session == identify_rollout("acme", "whole", "r-1")
    assert [each.refusals for each in found.refused] == [["NoReference"]] * 2


def test_a_session_with_more_text_than_a_person_reads_is_refused_and_no_other_with_it(
    tmp_path: Path,
) -> None:
    _, patch = make_repository(tmp_path / "shop")
    head = "--- /dev/null\n+++ b/long.txt\n@@ -0,0 +1 @@\n+"
    stores = Stores()

    async def record() -> None:
        async with living(stores) as intake:
            for user in ("long", "kept"):
                write_turns(stores.ledger, [turn(user, started_ms=NOW_MS)])
            await send(intake, "demonstration", "kept", text=patch)
            for number in range(17):
                diff = f"{head}{'x' * 65_000}\n"
                name = f"e-{number}"
                await send(intake, "edit_applied", "long", name, edit=name, diff=diff, numLines=1)
                await send(intake, "edit_observed", "long", name, edit=name, numAliveLines=1)

    asyncio.run(record())
    found = find(stores)
    assert [each.session for each in found.sessions] == [identify_rollout("acme", "kept", "r-1")]
    assert [each.refusals for each in found.refused] == [["TooLarge"]]


def test_a_review_is_never_larger_than_one_that_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(reviews, "MAX_REVIEW_BYTES", 100)
    review = SessionReview(tenant="acme", terms=[TERMS], sessions=[])
    with pytest.raises(UserError, match="--limit"):
        reviews.write_review(tmp_path / "review.yaml", review)
    assert not (tmp_path / "review.yaml").exists()


def test_other_objects_among_the_records_of_tasks_are_none() -> None:
    store, user = MemoryStore(), UserId("acme", "0" * 32)
    name = f"session-{'0' * 16}"
    record = TaskRecord(session="0" * 32, started_ms=NOW_MS, terms=TERMS)
    task_records.record_task(store, user, name, record)
    for tenant in ("abc", "ff"):
        store.put(f"tasks/{tenant}/{user.digest}/{name}.json", b"{}")
    assert list(task_records.list_tasks(store)) == [RecordedTask(user, name)]


def test_a_user_who_takes_consent_back_or_is_erased_withdraws_the_task() -> None:
    stores = Stores()
    user = SECRET.user_id("acme", "u")

    async def record(*, erase: bool) -> None:
        async with living(stores) as intake:
            await send(intake, "shown", "u", str(erase))
            if erase:
                await intake.ledger.erase_user(user, now_ms=NOW_MS + 9)

    def reasons(started_ms: int = NOW_MS) -> list[str]:
        ledger = LedgerReader.open(stores.ledger, stores.keys, SECRET, uid="test")
        return find_user_refusals(ledger, user, started_ms, [TERMS])

    asyncio.run(record(erase=False))
    assert reasons() == []
    asyncio.run(record(erase=True))
    assert reasons() == ["Erased"]
    assert reasons(NOW_MS + 10**9) == ["NoConsentForTasks"]
