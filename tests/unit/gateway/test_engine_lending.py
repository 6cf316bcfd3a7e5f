"""A gateway lends the engines that users do without, and takes them back before they need them."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.gateway.served import (
    MODEL,
    PlayedEngine,
    ServedGateway,
    serve_route,
    start_engine,
)

from etude.agent.chat import ChatFormat
from etude.common.api.route.spec import EngineLending
from etude.gateway.lending import LOAN_S, EngineLender, choose_lent, engines_needed
from etude.v1 import weights_pb2

NUM_ENGINES = 4
Status = weights_pb2.WeightStatus
COUNTS = st.integers(0, 40)
LOADS = st.lists(st.tuples(COUNTS, st.sampled_from([1.0, 400.0])), max_size=8)
RULES = st.builds(
    # By a function: from a model's signature, which has aliases, values would be made twice.
    lambda replicas, turns: EngineLending(min_replicas=replicas, turns_per_engine=turns),
    st.integers(1, 4),
    st.integers(1, 20),
)


def loads_of(found: list[tuple[int, float]]) -> list[Status]:
    return [Status(user_turns_peak=peak, observed_seconds=seconds) for peak, seconds in found]


@given(LOADS, RULES)
def test_users_keep_the_least_and_a_third_more_than_their_peak(
    found: list[tuple[int, float]], rules: EngineLending
) -> None:
    needed = engines_needed(loads_of(found), rules, 8)
    assert min(8, rules.min_replicas) <= needed <= 8
    if any(seconds < rules.window_seconds for _, seconds in found):
        assert needed == 8, "an engine that has just started has seen too little"
    peak = sum(count for count, _ in found)
    assert needed == 8 or needed * rules.turns_per_engine >= 1.3 * peak


@given(LOADS, RULES, st.sets(st.integers(0, 7)))
def test_as_many_engines_as_users_need_answer_and_are_not_lent(
    found: list[tuple[int, float]], rules: EngineLending, silent: set[int]
) -> None:
    statuses = {
        str(place): None if place in silent else each for place, each in enumerate(loads_of(found))
    }
    lent = choose_lent(statuses, rules)
    answering = [each for each in statuses.values() if each is not None]
    needed = engines_needed(answering, rules, len(statuses))
    assert all(statuses[target] is not None for target in lent)
    assert len(answering) - len(lent) >= min(needed, len(answering))


@dataclass
class Served:
    """A gateway with engines that it may lend."""

    gateway: ServedGateway
    engines: list[PlayedEngine]

    @property
    def lender(self) -> EngineLender:
        assert self.gateway.parts.lender is not None
        return self.gateway.parts.lender

    @property
    def lent(self) -> list[bool]:
        return [each.lending == weights_pb2.LENDING_STATE_LENT for each in self.engines]

    async def talk(self) -> None:
        """Let Alice say something that is not the continuation of anything."""
        message = {"role": "user", "content": f"Hello {len(self.asked)}."}
        async with httpx2.AsyncClient() as client:
            answer = await client.post(
                f"{self.gateway.url}/v1/chat/completions",
                headers={"authorization": f"Bearer {self.gateway.key}"},
                json={"model": MODEL, "messages": [message]},
            )
        assert answer.status_code == 200, answer.text

    @property
    def asked(self) -> list[int]:
        """Engine of each request that was sampled."""
        return [place for place, each in enumerate(self.engines) for _ in each.requests]


@pytest.fixture
async def served(tmp_path: Path, plain: ChatFormat) -> AsyncIterator[Served]:
    engines = [PlayedEngine(plain, lambda _: "Yes.") for _ in range(NUM_ENGINES)]
    servers = [await start_engine(engine) for engine in engines]
    targets = [f"127.0.0.1:{server.port}" for server in servers]
    route = {"lending": {"minReplicas": 1, "turnsPerEngine": 2}}
    async with serve_route(tmp_path, plain, targets, route) as gateway:
        yield Served(gateway, engines)
    for server in servers:
        await server.stop(0)


async def test_all_but_the_least_are_lent_while_nobody_comes(served: Served) -> None:
    await served.lender.step()
    assert served.lent == [False, True, True, True]
    for _ in range(12):
        await served.talk()
    assert set(served.asked) == {0}, "turns of users go to the one that serves them"

    await served.lender.step()
    assert served.engines[1].loans == [LOAN_S, LOAN_S], "a loan is repeated before it ends"


async def test_engines_come_back_as_users_need_them_and_before_they_fill_the_others(
    served: Served,
) -> None:
    await served.lender.step()
    served.engines[0].user_turns_peak = 2

    await served.lender.step()

    assert served.lent == [False, False, True, True]
    assert served.engines[1].loans == [LOAN_S, 0]
    served.engines[1].lending = weights_pb2.LENDING_STATE_SERVING
    await served.lender.step()
    for _ in range(30):
        await served.talk()
    assert set(served.asked) == {0, 1}


async def test_an_engine_that_still_returns_gets_no_turns(served: Served) -> None:
    served.engines[0].user_turns_peak = 8
    served.engines[2].lending = weights_pb2.LENDING_STATE_RETURNING
    await served.lender.step()
    for _ in range(20):
        await served.talk()
    assert 2 not in served.asked
    assert not any(each.loans for each in served.engines)


async def test_turns_reach_an_engine_that_serves_although_another_gateway_lent_the_rest(
    served: Served,
) -> None:
    """A gateway that has not looked since is refused, and asks others."""
    for engine in served.engines[1:]:
        engine.lending = weights_pb2.LENDING_STATE_LENT
    for _ in range(12):
        await served.talk()
    assert set(served.asked) == {0}


async def test_nothing_is_lent_by_an_engine_that_has_just_started(served: Served) -> None:
    served.engines[3].observed_s = 10.0
    await served.lender.step()
    assert served.lent == [False] * NUM_ENGINES


async def test_a_route_without_lending_lends_nothing(tmp_path: Path, plain: ChatFormat) -> None:
    server = await start_engine(PlayedEngine(plain, lambda _: "Yes."))
    async with serve_route(tmp_path, plain, [f"127.0.0.1:{server.port}"], {}) as gateway:
        assert gateway.parts.lender is None
    await server.stop(0)
