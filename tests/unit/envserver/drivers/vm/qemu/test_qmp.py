"""The monitor's connection, against monitors that were taken over."""

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator

import pytest

from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.drivers.vm.qemu import migration
from etude.envserver.drivers.vm.qemu.qmp import LINE_BYTES, QmpClient, pass_file

GREETING: dict[str, object] = {"QMP": {"version": {}, "capabilities": []}}


class Monitor:
    """The other end of a connection."""

    def __init__(self) -> None:
        self.ours, self.end = socket.socketpair()
        self.ours.settimeout(0)
        self.end.settimeout(0)
        self.descriptors: list[int] = []

    async def say(self, message: object) -> None:
        await self.say_raw(json.dumps(message).encode() + b"\r\n")

    async def say_raw(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.end, data)

    async def heard(self) -> dict[str, object]:
        data = await asyncio.to_thread(self._receive)
        message: dict[str, object] = json.loads(data)
        return message

    def _receive(self) -> bytes:
        self.end.settimeout(30)
        data, self.descriptors, _, _ = socket.recv_fds(self.end, 65536, 4)
        self.end.settimeout(0)
        return data


@pytest.fixture
async def monitor() -> AsyncIterator[Monitor]:
    made = Monitor()
    yield made
    made.end.close()


@pytest.fixture
async def qmp(monitor: Monitor) -> AsyncIterator[QmpClient]:
    made = QmpClient(monitor.ours, "test")
    yield made
    await made.close()


async def test_a_command_gets_the_answer_with_its_number_whatever_the_order(
    monitor: Monitor, qmp: QmpClient
) -> None:
    first = asyncio.create_task(qmp.execute("stop"))
    one = await monitor.heard()
    second = asyncio.create_task(qmp.execute("query-status"))
    two = await monitor.heard()
    await monitor.say({"return": {"status": "paused"}, "id": two["id"]})
    await monitor.say({"return": {}, "id": one["id"]})
    assert await second == {"status": "paused"}
    assert await first == {}


async def test_a_refused_command_says_what_the_monitor_said(
    monitor: Monitor, qmp: QmpClient
) -> None:
    task = asyncio.create_task(qmp.execute("cont"))
    number = (await monitor.heard())["id"]
    await monitor.say({"error": {"class": "GenericError", "desc": "not now"}, "id": number})
    with pytest.raises(VmmError, match="cont: not now"):
        await task


async def test_an_event_reaches_who_expects_it_and_nobody_else(
    monitor: Monitor, qmp: QmpClient
) -> None:
    stopped = qmp.expect(lambda event: event["event"] == "STOP")
    await monitor.say({"event": "RESUME"})
    await monitor.say({"event": "STOP", "data": 1})
    assert (await stopped)["data"] == 1


async def test_a_descriptor_goes_along_with_its_command(monitor: Monitor, qmp: QmpClient) -> None:
    reader, writer = os.pipe()
    task = asyncio.create_task(qmp.execute("getfd", {"fdname": "x"}, descriptors=(writer,)))
    message = await monitor.heard()
    os.write(monitor.descriptors[0], b"through")
    assert os.read(reader, 100) == b"through"
    await monitor.say({"return": {}, "id": message["id"]})
    await task
    for descriptor in (reader, writer, *monitor.descriptors):
        os.close(descriptor)


@pytest.mark.parametrize(
    "said",
    [
        b"no json\n",
        b"[1]\n",
        b"[" * 100_000 + b"\n",
        b'{"return": {}}\n',
        b'{"return": {}, "id": "1"}\n',
        b"{}\n",
        b"\xff\xfe\n",
        b"x" * (LINE_BYTES + 1),
    ],
    ids=["text", "list", "deep", "no id", "id as text", "empty", "bytes", "endless"],
)
async def test_whatever_is_not_the_protocol_ends_the_connection(
    monitor: Monitor, qmp: QmpClient, said: bytes
) -> None:
    task = asyncio.create_task(qmp.execute("stop"))
    await monitor.heard()
    await monitor.say_raw(said)
    with pytest.raises(VmmError):
        await task
    with pytest.raises(VmmError):
        await qmp.execute("cont")


async def test_an_answer_nobody_asked_for_and_a_flood_of_events_change_nothing(
    monitor: Monitor, qmp: QmpClient
) -> None:
    await monitor.say({"return": {}, "id": 999})
    for _ in range(1000):
        await monitor.say({"event": "NOISE"})
    task = asyncio.create_task(qmp.execute("stop"))
    await monitor.say({"return": {}, "id": (await monitor.heard())["id"]})
    assert await task == {}


async def test_a_silent_monitor_is_given_up(qmp: QmpClient) -> None:
    with pytest.raises(VmmError, match=r"stop: no answer in 0\.01 s"):
        await qmp.execute("stop", limit_s=0.01)


async def test_a_monitor_that_ends_ends_everything_that_waits_for_it(
    monitor: Monitor, qmp: QmpClient
) -> None:
    event = qmp.expect(lambda _: True)
    task = asyncio.create_task(qmp.execute("stop"))
    await monitor.heard()
    monitor.end.close()
    for waiting in (task, event):
        with pytest.raises(VmmError, match="closed the connection"):
            await waiting


async def test_the_greeting_comes_before_the_first_command(
    monitor: Monitor, qmp: QmpClient
) -> None:
    task = asyncio.create_task(qmp.greet())
    await monitor.say(GREETING)
    heard = await monitor.heard()
    assert heard["execute"] == "qmp_capabilities"
    await monitor.say({"return": {}, "id": heard["id"]})
    await task


@pytest.mark.parametrize("answer", [{}, [], None, {"fdset-id": "1", "fd": 2}, {"fdset-id": -1}])
async def test_a_file_that_the_monitor_took_has_a_number(
    monitor: Monitor, qmp: QmpClient, answer: object
) -> None:
    reader, writer = os.pipe()
    task = asyncio.create_task(pass_file(qmp, writer))
    await monitor.say({"return": answer, "id": (await monitor.heard())["id"]})
    with pytest.raises(VmmError, match="has no numbers"):
        await task
    for descriptor in (reader, writer, *monitor.descriptors):
        os.close(descriptor)


async def test_a_monitor_that_is_not_done_with_a_state_is_waited_for(
    monitor: Monitor, qmp: QmpClient
) -> None:
    task = asyncio.create_task(migration.wait_until_settled(qmp))
    for status in ("finish-migrate", "finish-migrate", "postmigrate"):
        asked = await monitor.heard()
        assert not task.done()
        await monitor.say({"return": {"status": status}, "id": asked["id"]})
    await task
