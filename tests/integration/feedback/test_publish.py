"""Events over gRPC are stored by the rules of HTTP, in the same ledger."""

import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc
import httpx
import pytest
from tests.support.feedback import events as examples
from tests.support.feedback.process import FeedbackProcess
from tests.support.free_ports import reserve_port

from etude.common import api_keys
from etude.v1 import feedback_pb2, feedback_pb2_grpc


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[FeedbackProcess]:
    service = FeedbackProcess.prepare(tmp_path)
    key, line = api_keys.make_key("reader", "export")
    (tmp_path / "reader.key").write_text(key)
    with (tmp_path / "api-keys").open("a") as file:
        file.write(f"{line} tenant=acme\n")
    (tmp_path / "release.json").write_text("{}")
    service.settings = {
        "ETUDE_FEEDBACK_RELEASE": str(tmp_path / "release.json"),
        "ETUDE_FEEDBACK_RELEASE_PORT": str(reserve_port()),
    }
    await service.start()
    yield service
    if service.process is not None and service.process.returncode is None:
        await service.stop(signal.SIGKILL)


async def publish(
    service: FeedbackProcess, items: Sequence[bytes], key: str | None = None
) -> list[tuple[str, int, str]]:
    target = f"127.0.0.1:{service.settings['ETUDE_FEEDBACK_RELEASE_PORT']}"
    metadata = (("authorization", f"Bearer {service.key if key is None else key}"),)
    async with grpc.aio.insecure_channel(target) as channel:
        stub = feedback_pb2_grpc.FeedbackServiceStub(channel)
        request = feedback_pb2.PublishRequest(events=items)
        answer = await stub.Publish(request, metadata=metadata, timeout=60)
    return [(each.id, each.status, each.reason) for each in answer.results]


async def test_events_of_both_ways_are_one_ledger(service: FeedbackProcess) -> None:
    items = [
        examples.encoded(id="1"),
        examples.encoded(id="no", user="u-2", granted=False),
        examples.encoded(id="other", tenant="globex"),
        examples.encoded(id="1", text="other words"),
        b'{"id": "x"}',
    ]
    answers = await publish(service, [*items, b"\xff", b" " * (257 << 10)])
    assert answers == [
        ("1", 202, "Stored"),
        ("no", 403, "NotGranted"),
        ("other", 403, "OtherTenant"),
        ("1", 409, "ReusedId"),
        ("", 400, "InvalidEvent"),
        ("", 400, "InvalidEvent"),
        ("", 413, "TooLarge"),
    ]
    await service.stop(signal.SIGKILL)
    await service.start()
    headers = service.headers | {"content-type": "application/cloudevents-batch+json"}
    async with httpx.AsyncClient(headers=headers, timeout=60) as client:
        body = b"[" + b",".join(items) + b"]"
        results = (await client.post(f"{service.url}/v1/events", content=body)).json()["results"]
    again = [(each["id"], each["status"], each["reason"]) for each in results]
    assert again == [("1", 200, "Duplicate"), *answers[1:5]]
    assert await publish(service, items) == again
    assert await service.export() == ["1"]


async def test_a_call_without_a_key_that_may_or_with_too_much_is_refused(
    service: FeedbackProcess,
) -> None:
    reader = (service.folder / "reader.key").read_text()
    event = examples.encoded(id="1")
    for items, key_, code in (
        ([event], "", grpc.StatusCode.UNAUTHENTICATED),
        ([event], reader, grpc.StatusCode.PERMISSION_DENIED),
        ([event] * 1_001, None, grpc.StatusCode.INVALID_ARGUMENT),
        ([b" " * (1 << 20)] * 5, None, grpc.StatusCode.RESOURCE_EXHAUSTED),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await publish(service, items, key_)
        assert caught.value.code() is code
    assert await service.export() == []
