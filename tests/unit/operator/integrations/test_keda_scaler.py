"""What KEDA hears about pools that it sizes, over gRPC and in the bytes that it sends."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.support import pki

from etude.common.errors import UserError
from etude.common.rpc import channels
from etude.common.tls.credentials import Credentials
from etude.common.tls.identity import Identity
from etude.common.tls.transport import TransportSecurity
from etude.keda import external_scaler_pb2, external_scaler_pb2_grpc
from etude.operator.integrations.keda_scaler import serve_scaler
from etude.operator.manifests import Ref
from etude.v1 import environments_pb2

BROKER = "repos-broker-0.repos-broker:7020"
PATIENCE_S = 60.0
ABOUT = {"pool": "repos", "scalerAddress": "etude-operator.etude-system:7070"}


def body(mode: str = "External") -> Any:
    spec: dict[str, Any] = {"templates": [{"name": "python"}], "slotsPerReplica": 10}
    spec["autoscaling"] = {"mode": mode}
    if mode != "External":
        spec["maxReplicas"] = 4
    metadata = {"name": "repos", "namespace": "lab"}
    return {
        "apiVersion": "etude.dev/v1alpha1",
        "kind": "EnvPool",
        "metadata": metadata,
        "spec": spec,
    }


def ref(namespace: str = "lab", **metadata: str) -> external_scaler_pb2.ScaledObjectRef:
    return external_scaler_pb2.ScaledObjectRef(
        name="repos", namespace=namespace, scalerMetadata=ABOUT | metadata
    )


async def say(
    lab: Any, *, leased: int = 0, opening: int = 0, waiting: int = 0, planned: int = 0
) -> None:
    now_ms = round(1000 * lab.clock.monotonic_s())
    wave = environments_pb2.PlannedWave(template="python", count=planned, start_unix_ms=now_ms)
    plan = environments_pb2.PlanFigures(
        run_id="run", heard_unix_ms=now_ms, until_unix_ms=now_ms + 60_000, ratio=1.0, waves=[wave]
    )
    lab.peers.pools[BROKER].append(
        environments_pb2.WatchPoolResponse(
            told_unix_ms=now_ms,
            slots=40,
            leased=leased,
            opening=opening,
            waiting=waiting,
            plans=[plan] if planned else [],
        )
    )
    await lab.settle()
    await lab.advance(6)


@pytest.fixture
async def channel(lab: Any) -> AsyncIterator[grpc.aio.Channel]:
    async with serve_scaler(lab.cluster, "127.0.0.1", 0) as server:
        assert server is not None
        async with channels.dial(f"127.0.0.1:{server.port}") as made:
            yield made


@pytest.fixture
async def keda(
    lab: Any, channel: grpc.aio.Channel
) -> "external_scaler_pb2_grpc.ExternalScalerAsyncStub":
    lab.cluster.upsert(body())
    await lab.settle()
    await say(lab)
    return external_scaler_pb2_grpc.ExternalScalerStub(channel)


async def value(keda: Any) -> float:
    request = external_scaler_pb2.GetMetricsRequest(scaledObjectRef=ref(), metricName="etude-slots")
    (found,) = (await keda.GetMetrics(request)).metricValues
    assert found.metricValue == found.metricValueFloat
    return float(found.metricValueFloat)


async def test_a_pool_is_active_as_soon_as_somebody_asks(lab: Any, keda: Any) -> None:
    assert not (await keda.IsActive(ref())).result
    await say(lab, waiting=1)
    assert (await keda.IsActive(ref())).result


async def test_the_value_is_what_is_leased_and_opened_and_waited_for(lab: Any, keda: Any) -> None:
    await say(lab, leased=7, opening=3, waiting=5)
    assert await value(keda) == 15


async def test_environments_that_are_only_being_opened_keep_a_pool_active(
    lab: Any, keda: Any
) -> None:
    await say(lab, opening=30)
    assert await value(keda) == 30
    assert (await keda.IsActive(ref())).result
    slots = lab.cluster.get(Ref("EnvPool", "lab", "repos"))["status"]["slots"]
    assert (slots["idle"], slots["opening"]) == (10, 30)


async def test_plans_count_before_their_waves_come(lab: Any, keda: Any) -> None:
    await say(lab, leased=2, planned=30)
    assert await value(keda) >= 30


async def test_the_target_is_what_a_replica_serves_with_room_to_spare(keda: Any) -> None:
    (found,) = (await keda.GetMetricSpec(ref())).metricSpecs
    assert (found.metricName, found.targetSize, found.targetSizeFloat) == ("etude-slots", 8, 8.0)
    (found,) = (await keda.GetMetricSpec(ref(targetUtilizationPercent="100"))).metricSpecs
    assert found.targetSizeFloat == 10


async def test_a_stream_tells_at_once_what_changes(lab: Any, keda: Any) -> None:
    stream = keda.StreamIsActive(ref())
    async with asyncio.timeout(PATIENCE_S):
        assert not (await stream.read()).result
        await say(lab, waiting=1)
        assert (await stream.read()).result
    stream.cancel()


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), str(caught.value.details())


async def test_what_cannot_be_answered_says_why(lab: Any, keda: Any) -> None:
    code, words = await refusal(keda.IsActive(external_scaler_pb2.ScaledObjectRef()))
    assert (code, "scalerMetadata.pool" in words) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    code, words = await refusal(keda.IsActive(ref(namespace="other")))
    assert (code, "no EnvPool repos" in words) == (grpc.StatusCode.NOT_FOUND, True)
    code, words = await refusal(keda.GetMetricSpec(ref(targetUtilizationPercent="0")))
    assert (code, "from 1 to 100" in words) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    lab.cluster.upsert(body("Reactive"))
    await lab.settle()
    code, words = await refusal(keda.IsActive(ref()))
    assert (code, "External" in words) == (grpc.StatusCode.FAILED_PRECONDITION, True)


async def test_silent_brokers_are_no_sign_of_no_demand(lab: Any, keda: Any) -> None:
    await say(lab, leased=7)
    assert await value(keda) == 7
    for _ in range(20):
        await lab.advance(2)
    code, _ = await refusal(keda.IsActive(ref()))
    assert code == grpc.StatusCode.UNAVAILABLE
    code, _ = await refusal(value(keda))
    assert code == grpc.StatusCode.UNAVAILABLE


async def test_what_a_replica_serves_is_known_while_brokers_are_silent(
    lab: Any, channel: grpc.aio.Channel
) -> None:
    lab.cluster.upsert(body())
    await lab.settle()
    keda = external_scaler_pb2_grpc.ExternalScalerStub(channel)
    (found,) = (await keda.GetMetricSpec(ref())).metricSpecs
    assert found.targetSizeFloat == 8


def field(number: int, content: bytes) -> bytes:
    """A length-delimited field, shorter than 128 bytes, as protocol buffers write it."""
    return bytes([number << 3 | 2, len(content)]) + content


def entries(metadata: dict[str, str]) -> Iterator[bytes]:
    for key, text in metadata.items():
        yield field(3, field(1, key.encode()) + field(2, text.encode()))


async def test_the_bytes_are_those_of_kedas_documentation(
    lab: Any, keda: Any, channel: grpc.aio.Channel
) -> None:
    """The request by hand, from https://keda.sh/docs/2.18/concepts/external-scalers/."""
    await say(lab, waiting=3)
    about = field(1, b"so") + field(2, b"lab") + b"".join(entries({"pool": "repos"}))
    asked: Any = channel.unary_unary("/externalscaler.ExternalScaler/IsActive")
    assert await asked(about) == bytes([1 << 3, 1])
    asked = channel.unary_unary("/externalscaler.ExternalScaler/GetMetrics")
    answer = await asked(field(1, about) + field(2, b"etude-slots"))
    three = b"\x00\x00\x00\x00\x00\x00\x08\x40"  # 3.0, little-endian
    value = field(1, b"etude-slots") + bytes([2 << 3, 3, 3 << 3 | 1]) + three
    assert answer == field(1, value)


async def test_nobody_is_answered_without_a_port(lab: Any) -> None:
    async with serve_scaler(lab.cluster, "127.0.0.1", None) as server:
        assert server is None


OPERATOR = Identity(domain="etude.dev", namespace="etude-system", role="operator")


async def test_without_certificates_it_is_served_in_the_clear_only_where_that_was_asked_for(
    lab: Any,
) -> None:
    with pytest.raises(UserError, match="would not be encrypted"):
        async with serve_scaler(
            lab.cluster, "0.0.0.0", 0, wire=TransportSecurity(allows_remote_plaintext=False)
        ):
            pass


async def test_with_certificates_keda_learns_who_answers_and_needs_none_itself(
    lab: Any, tmp_path: Path
) -> None:
    lab.cluster.upsert(body())
    await lab.settle()
    await say(lab, waiting=3)
    authority = pki.Authority()
    wire = TransportSecurity(
        credentials=Credentials(pki.write(tmp_path, authority.issue(OPERATOR)))
    )
    async with serve_scaler(lab.cluster, "127.0.0.1", 0, wire=wire) as server:
        assert server is not None
        target, name = f"127.0.0.1:{server.port}", OPERATOR.server_name
        known, other = (
            grpc.ssl_channel_credentials(ca) for ca in (authority.pem, pki.Authority().pem)
        )
        options = [("grpc.ssl_target_name_override", name)]
        async with grpc.aio.secure_channel(target, known, options=options) as channel:
            assert await value(external_scaler_pb2_grpc.ExternalScalerStub(channel)) == 3
        for stranger in (
            grpc.aio.secure_channel(target, other, options=options),
            grpc.aio.insecure_channel(target),
        ):
            async with stranger:
                keda = external_scaler_pb2_grpc.ExternalScalerStub(stranger)
                code, _ = await refusal(keda.IsActive(ref()))
                assert code is grpc.StatusCode.UNAVAILABLE
