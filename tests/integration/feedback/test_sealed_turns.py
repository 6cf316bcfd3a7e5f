"""Turns recorded by a gateway are sealed under keys of the ledger, and end with them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import openai
from prometheus_client import REGISTRY
from tests.support.feedback.lives import NOW_MS, SECRET, Stores, living
from tests.support.gateway.served import (
    MODEL,
    PlayedEngine,
    ServedGateway,
    serve_route,
    start_engine,
)
from typing_extensions import override

from etude.agent.chat import ChatFormat
from etude.common.rpc.server import Server
from etude.common.turns.turn_sealing import TurnKey, TurnSealer, derive_public_key
from etude.feedback.ledger.ledger import FeedbackLedger
from etude.feedback.ledger.user_keys import UserKeys
from etude.feedback.turn_keys import TurnKeyService, read_turn
from etude.v1 import turns_pb2, turns_pb2_grpc

TOKENIZER = Path(__file__).parents[2] / "unit" / "agent" / "model"
ALICE = SECRET.user_id("acme", "alice")


@dataclass(slots=True)
class PatientKeyService(TurnKeyService):
    """Answers gateways once it may."""

    may_answer: asyncio.Event = field(default_factory=asyncio.Event)

    @override
    async def GetTurnKey(
        self,
        request: turns_pb2.GetTurnKeyRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> turns_pb2.GetTurnKeyResponse:
        await self.may_answer.wait()
        return await TurnKeyService.GetTurnKey(self, request, context)


@dataclass
class Loop:
    """A gateway, the ledger of its route, and what answers for keys."""

    gateway: ServedGateway
    ledger: FeedbackLedger
    key_server: Server
    key_service: PatientKeyService
    chat: ChatFormat

    async def say(self, *texts: str) -> None:
        """Send a conversation of a user, and wait for the answer to its last message."""
        messages: list[Any] = []
        for text in texts:
            messages.append({"role": "user", "content": text})
            client = openai.AsyncOpenAI(
                base_url=f"{self.gateway.url}/v1", api_key=self.gateway.key, max_retries=0
            )
            answer = await client.chat.completions.create(model=MODEL, messages=messages)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})

    def read(self, records: Sequence[turns_pb2.TurnRecord]) -> list[turns_pb2.TurnRecord | None]:
        return [read_turn(record, self.ledger.state, self.ledger.keys) for record in records]


@contextlib.asynccontextmanager
async def running_loop(
    folder: Path, say: Callable[[str], str] = lambda _: "Done."
) -> AsyncIterator[Loop]:
    """A gateway over HTTP, an engine and the keys of a ledger over gRPC."""
    chat = ChatFormat.load(TOKENIZER)
    engine = await start_engine(PlayedEngine(chat, say))
    async with living(Stores()) as intake:
        keys = Server(["etude.v1.TurnKeyService"])
        service = PatientKeyService(intake.ledger)
        service.may_answer.set()
        turns_pb2_grpc.add_TurnKeyServiceServicer_to_server(service, keys.grpc_server)
        await keys.start()
        route = {"recordUnencrypted": False, "feedback": f"127.0.0.1:{keys.port}"}
        targets = [f"127.0.0.1:{engine.port}"]
        async with serve_route(folder, chat, targets, route) as gateway:
            yield Loop(gateway, intake.ledger, keys, service, chat)
        await keys.stop(0)
    await engine.stop(0)


async def test_a_recorded_turn_is_read_with_the_key_of_its_user_alone(tmp_path: Path) -> None:
    async with running_loop(tmp_path) as loop:
        await loop.say("Fix it.", "And a test.")
        first, second = await loop.gateway.records()
        for record in (first, second):
            assert (record.user, record.user_digest) == ("", ALICE.digest)
            assert not (record.prompt_token_ids)
            assert not (record.token_ids)
            assert not (record.logprobs)
        opened, continued = loop.read([first, second])
        assert opened is not None
        assert continued is not None
        assert "Fix it." in loop.chat.decode([*opened.prompt_token_ids])
        assert [*opened.token_ids] == loop.chat.completion("Done.")
        assert len(opened.logprobs) == len(opened.token_ids) == first.sealed.num_tokens
        prefix = len(opened.prompt_token_ids) + len(opened.token_ids)
        assert continued.num_prefix_tokens == prefix


async def test_an_erasure_of_feedback_makes_recorded_turns_unreadable_for_ever(
    tmp_path: Path,
) -> None:
    async with running_loop(tmp_path) as loop:
        await loop.say("Fix it.")
        await loop.ledger.erase_user(ALICE, now_ms=NOW_MS)
        # The gateway still has the public key of before: what it seals nobody reads.
        await loop.say("My secret.")
        assert loop.read(await loop.gateway.records()) == [None, None]
        key = await loop.ledger.user_key(ALICE)
        assert key.generation == 1
        assert loop.read(await loop.gateway.records()) == [None, None]


async def test_a_key_that_was_made_while_its_user_was_erased_reads_nothing(
    tmp_path: Path,
) -> None:
    async with running_loop(tmp_path) as loop:
        keys = loop.ledger.keys
        await loop.ledger.erase_user(ALICE, now_ms=NOW_MS)
        keys.find_or_create(ALICE, 0)  # a thread that had seen the generation of before
        assert keys.find(ALICE, 0) is None
        key = UserKeys(keys.store, SECRET).find_or_create(ALICE, 0)  # of a killed process
        record = turns_pb2.TurnRecord(turn_id="t-1", token_ids=[1, 2], logprobs=[-1.0, -2.0])
        record.tenant = ALICE.tenant
        TurnSealer.make(TurnKey(ALICE.digest, 0, derive_public_key(key))).seal(record)
        assert loop.read([record]) == [None]


async def test_a_turn_in_which_its_key_expires_is_recorded(tmp_path: Path) -> None:
    clock = [1_000.0]

    def say(_: str) -> str:
        clock[0] += 400.0
        return "Done."

    async with running_loop(tmp_path, say) as loop:
        recorder = loop.gateway.parts.app.service.recorder
        assert recorder is not None
        assert recorder.keys is not None
        recorder.keys.now_s = lambda: clock[0]
        await loop.say("Fix it.", "And a test.")
        records = await loop.gateway.records()
        assert len(records) == 2
        assert None not in loop.read(records)


async def test_a_withheld_turn_has_no_tokens_for_who_has_the_key_either(tmp_path: Path) -> None:
    async with running_loop(tmp_path) as loop:
        await loop.say(f"Use ghp_{'a1B2' * 9} for it.")
        (record,) = await loop.gateway.records()
        (opened,) = loop.read([record])
        assert opened is not None
        assert (record.user_digest, opened.user) == (ALICE.digest, "")
        assert not (opened.prompt_token_ids)
        assert not (opened.token_ids)
        assert not (opened.logprobs)
        assert opened.withheld.num_tokens == len(loop.chat.completion("Done."))


async def test_an_answer_does_not_wait_for_the_key_under_which_its_record_is_sealed(
    tmp_path: Path,
) -> None:
    async with running_loop(tmp_path) as loop:
        loop.key_service.may_answer.clear()
        await loop.say("Fix it.", "And a test.")
        loop.key_service.may_answer.set()
        records = await loop.gateway.records()
        assert len(records) == 2
        assert None not in loop.read(records)


async def test_users_are_served_and_not_recorded_while_nothing_gives_keys(tmp_path: Path) -> None:
    def count() -> float:
        labels = {"result": "no_key"}
        return REGISTRY.get_sample_value("etude_gateway_recorded_turns_total", labels) or 0.0

    async with running_loop(tmp_path) as loop:
        await loop.key_server.stop(0)
        before = count()
        await asyncio.wait_for(loop.say("Fix it."), 30)
        assert await loop.gateway.records() == []
        assert count() == before + 1
