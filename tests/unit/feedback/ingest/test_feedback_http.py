"""The feedback service over HTTP: an answer for each event, given once it is durable."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.feedback import events as examples
from tests.support.feedback.lives import SECRET, Stores, ids, living

from etude.common import api_keys
from etude.common.api_keys import ApiKeyFile
from etude.common.blobs import MemoryStore
from etude.common.errors import StoreError
from etude.common.feedback.events import EVENTS, MAX_BATCH_BYTES, MAX_EVENT_BYTES
from etude.feedback.ingest import app as http
from etude.feedback.ingest import intake as intake_module
from etude.feedback.ingest.intake import EventIntake


@dataclass
class Service:
    """A service with keys of four kinds, and a client of it."""

    intake: EventIntake
    client: httpx.AsyncClient
    keys: dict[str, str]

    async def post(self, path: str, body: Any, *, key: str = "server", **headers: str) -> Any:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"authorization": f"Bearer {self.keys[key]}", "content-type": http.EVENT_TYPE}
        return await self.client.post(path, content=content, headers={**given, **headers})

    async def batch(self, items: list[Any], *, key: str = "server") -> list[tuple[int, str]]:
        answer = await self.post("/v1/events", items, key=key, **{"content-type": http.BATCH_TYPE})
        assert answer.status_code == 200, answer.text
        return [(each["status"], each["reason"]) for each in answer.json()["results"]]

    async def get(self, path: str, *, key: str) -> Any:
        headers = {"authorization": f"Bearer {self.keys[key]}"}
        return await self.client.get(path, headers=headers)


@pytest.fixture
def stores() -> Stores:
    return Stores()


@pytest.fixture
async def service(tmp_path: Path, stores: Stores) -> AsyncIterator[Service]:
    given = {
        "server": ("backend", "users,export", "tenant=acme consent=2026-11"),
        "user": ("u-1", "feedback", "tenant=acme consent=2026-11"),
        "other": ("backend", "users,export", "tenant=other consent=2026-11"),
        "closed": ("backend", "users", "tenant=acme"),
        "reader": ("reader", "export", "tenant=acme limit=2"),
        "slow": ("slow", "users", "tenant=acme consent=2026-11 limit=2"),
    }
    keys, lines = {}, []
    for name, (user, scopes, options) in given.items():
        keys[name], line = api_keys.make_key(user, scopes)
        lines.append(f"{line} {options}")
    keys["unknown"] = "etude_unknown"
    (tmp_path / "keys").write_text("\n".join(lines))
    async with living(stores) as intake:
        app = http.build_application(ApiKeyFile.load(tmp_path / "keys"), intake)
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://feedback") as client:
            yield Service(intake, client, keys)


async def test_an_event_is_stored_known_again_and_not_replaced(service: Service) -> None:
    assert (await service.post("/v1/events", examples.event(id="1"))).status_code == 202
    assert service.intake.ledger.log.depth == 0, "answered before it was durable"
    again = json.dumps(examples.event(id="1"), indent=2).encode()
    assert (await service.post("/v1/events", again)).status_code == 200
    other = examples.event(id="1", text="something else")
    assert (await service.post("/v1/events", other)).status_code == 409
    assert ids(service.intake.ledger) == ["1"]


@pytest.mark.parametrize(
    ("key", "fields", "status", "reason"),
    [
        ("unknown", {}, 401, "Unauthenticated"),
        ("other", {}, 403, "OtherTenant"),
        ("user", {"user": "u-2"}, 403, "OtherUser"),
        ("user", {}, 202, "Stored"),
        ("closed", {}, 403, "TenantWithoutConsent"),
        ("server", {"granted": False}, 403, "NotGranted"),
        ("server", {"decided": "2036-01-01T00:00:00Z"}, 400, "InvalidEvent"),
        ("server", {"id": "AKIA" + "A2B3" * 4}, 400, "InvalidEvent"),
        ("server", {"kind": "dryrun"}, 200, "Checked"),
        ("server", {"text": "x" * 70_000}, 400, "InvalidEvent"),
    ],
)
async def test_each_event_has_its_answer(
    service: Service, key: str, fields: dict[str, Any], status: int, reason: str
) -> None:
    answer = await service.post("/v1/events", examples.event(**fields), key=key)
    assert (answer.status_code, answer.json()["reason"]) == (status, reason)
    assert len(ids(service.intake.ledger)) == (status == 202)


async def test_a_batch_is_answered_event_by_event(service: Service) -> None:
    items: list[Any] = [examples.event(kind, id=kind) for kind in EVENTS if kind != "dryrun"]
    refusal = examples.event(id="x", granted=False, user="u-2")
    items += [examples.event(id="shown"), {"type": "?"}, 7, refusal]
    answers = await service.batch(items)
    assert answers[: len(EVENTS) - 1] == [(202, "Stored")] * (len(EVENTS) - 1)
    assert [status for status, _ in answers[len(EVENTS) - 1 :]] == [409, 400, 400, 403]
    assert len(ids(service.intake.ledger)) == len(EVENTS) - 1


async def test_what_is_too_large_is_refused_with_the_limit(service: Service) -> None:
    large = examples.encoded(text="x" * MAX_EVENT_BYTES)
    answer = await service.post("/v1/events", large)
    assert answer.status_code == 413
    assert str(MAX_EVENT_BYTES) in answer.json()["message"]
    answer = await service.post("/v1/events", b" " * (MAX_BATCH_BYTES + 1))
    assert answer.status_code == 413


async def test_a_body_of_another_type_is_refused(service: Service) -> None:
    answer = await service.post("/v1/events", b"{}", **{"content-type": "text/plain"})
    assert answer.status_code == 415


async def test_more_events_than_the_rate_wait(service: Service) -> None:
    assert await service.batch([examples.event(id="1"), examples.event(id="2")], key="slow")
    answer = await service.post("/v1/events", examples.event(id="3"), key="slow")
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1


async def test_secrets_are_gone_before_anything_is_stored(service: Service, stores: Stores) -> None:
    secret = "ghp_" + "a1B2" * 9
    await service.post("/v1/events", examples.event(text=f"use {secret} or jo@corp.io"))
    page = await service.get("/v1/events", key="server")
    assert secret not in page.text
    assert "jo@corp.io" not in page.text
    (event,) = page.json()["events"]
    assert event["event"]["data"]["payload"]["text"].startswith("use ⟦secret:github:")
    assert secret.encode() not in stores.contents()


async def test_a_tenant_exports_its_own_events_page_by_page(service: Service) -> None:
    await service.batch([examples.event(id=str(number)) for number in range(5)])
    after, found = 0, []
    while after is not None:
        page = (await service.get(f"/v1/events?after={after}&limit=2", key="server")).json()
        assert len(page["events"]) <= 2
        found += [each["event"]["id"] for each in page["events"]]
        after = page["next"]
    assert found == list("01234")
    assert (await service.get("/v1/events", key="other")).json()["events"] == []
    assert (await service.get("/v1/events", key="user")).status_code == 403
    assert (await service.get("/v1/events?after=x", key="server")).status_code == 400


async def test_pages_count_against_the_rate_of_their_key(service: Service) -> None:
    statuses = [(await service.get("/v1/events", key="reader")).status_code for _ in range(3)]
    assert statuses == [200, 200, 429]


async def test_a_user_takes_the_consent_back_and_is_erased(
    service: Service, stores: Stores
) -> None:
    await service.post("/v1/events", examples.event(id="1"))
    decision = {"user": "u-1", "at": "2026-11-02T00:00:00Z"}
    assert (await service.post("/v1/revocations", decision, key="other")).status_code == 202
    assert ids(service.intake.ledger) == ["1"], "another tenant's u-1 is another user"
    assert (await service.post("/v1/revocations", decision, key="user")).status_code == 202
    assert ids(service.intake.ledger) == []
    other = {**decision, "user": "u-2"}
    assert (await service.post("/v1/revocations", other, key="user")).status_code == 403
    erased = await service.post("/v1/erasures", {"user": "u-1"}, key="user")
    assert erased.json() == {"user": "u-1", "numEvents": 1, "tasks": []}
    digest = SECRET.user_id("acme", "u-1").digest
    assert not any(digest in key for key in stores.keys.objects)


async def test_a_store_that_is_away_costs_a_503_and_no_event(
    service: Service, stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake_module, "ACKNOWLEDGE_S", 0.05)
    create, is_away = MemoryStore.create, True

    def refuse(store: MemoryStore, key: str, data: bytes) -> None:
        if is_away and store is stores.ledger:
            raise StoreError("away")
        create(store, key, data)

    monkeypatch.setattr(MemoryStore, "create", refuse)
    answer = await service.post("/v1/events", examples.event(id="1"))
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "10")
    is_away = False
    monkeypatch.setattr(intake_module, "ACKNOWLEDGE_S", 30.0)
    assert (await service.post("/v1/events", examples.event(id="1"))).status_code == 200
    assert ids(service.intake.ledger) == ["1"]


async def test_nothing_is_appended_while_too_many_bytes_wait_for_the_store(
    service: Service, stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake_module, "ACKNOWLEDGE_S", 0.05)
    monkeypatch.setattr(intake_module, "MAX_PENDING_BYTES", 3_000)
    create, is_away = MemoryStore.create, True

    def refuse(store: MemoryStore, key: str, data: bytes) -> None:
        if is_away and store is stores.ledger:
            raise StoreError("away")
        create(store, key, data)

    monkeypatch.setattr(MemoryStore, "create", refuse)
    log = service.intake.ledger.log
    # One batch is larger than the room: it is checked event by event.
    items = [examples.event(id=str(number), text="x" * 1_000) for number in range(20)]
    answer = await service.post("/v1/events", items, **{"content-type": http.BATCH_TYPE})
    assert answer.status_code == 503
    assert 3_000 <= log.pending_bytes < 6_000
    waiting = log.pending_bytes
    decision = {"user": "u-1", "at": "2026-11-02T00:00:00Z"}
    for path, body in [
        ("/v1/events", examples.event(id="x")),
        ("/v1/events", examples.event(id="x", granted=False)),
        ("/v1/revocations", decision),
        ("/v1/erasures", {"user": "u-1"}),
    ]:
        assert (await service.post(path, body)).status_code == 503, path
    assert log.pending_bytes == waiting
    is_away = False
    await log.wait_durable()
    assert log.pending_bytes == 0
    assert (await service.post("/v1/revocations", decision)).status_code == 202


async def test_schemas_are_published(service: Service) -> None:
    for kind in EVENTS:
        assert (await service.client.get(f"/v1/schemas/{kind}")).json()["type"] == "object"
    assert (await service.client.get("/v1/schemas/nothing")).status_code == 400
