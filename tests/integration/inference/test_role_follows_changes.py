"""The role as a process follows deltas in a folder, and is back after a kill."""

from typing import Any

import pytest
import torch
from tests.support.weights.model_tensors import schema_of, words_of
from tests.support.weights.publishing import TrainedPolicy
from transformers import AutoConfig, AutoModelForCausalLM

from etude.common.rpc.channels import dial
from etude.common.weights import VersionId
from etude.common.weights.protocol.reader_leases import observe_leases
from etude.v1 import weights_pb2, weights_pb2_grpc

RUN_UID = "uid-tiny"
DEADLINE_S = 120


def initial_policy(folder: str) -> TrainedPolicy:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(folder), dtype=torch.float32
    )
    return TrainedPolicy(schema_of(model), words_of(model))


async def served(role: Any, version: VersionId) -> weights_pb2.WeightStatus:
    """The role's status once it was told to commit a version."""
    async with dial(f"127.0.0.1:{role.grpc_port}") as channel:
        stub = weights_pb2_grpc.WeightServiceStub(channel)
        request = weights_pb2.CommitVersionRequest(version=version.to_proto())
        answer = await stub.CommitVersion(request, timeout=DEADLINE_S, wait_for_ready=True)
    return answer.status


@pytest.mark.long
async def test_a_role_follows_deltas_and_comes_back_to_the_newest_after_a_kill(role: Any) -> None:
    policy = initial_policy(str(role.model))
    version = policy.publish(role.store, 0, complete=True, run=RUN_UID).version
    role.await_answer(role.probe_port, "/readyz", 200)
    for number in range(1, 4):
        policy.step()
        version = policy.publish(role.store, number, run=RUN_UID).version
        status = await served(role, version)
        assert VersionId.from_proto(status.live) == version
        assert status.state == weights_pb2.REPLICA_STATE_SERVING
    [lease] = observe_leases(role.store)
    assert (lease.replica, lease.needs) == ("tiny-inference-0", version)
    text = role.await_answer(role.probe_port, "/metrics", 200).text
    for name in ('etude_weights_bytes_total{codec="blocks",kind="delta"}', "audit_total{result="):
        assert name in text
    role.kill()
    policy.step()
    newest = policy.publish(role.store, 4, run=RUN_UID)
    role.start()
    role.await_answer(role.probe_port, "/readyz", 200)
    status = await served(role, newest.version)
    assert status.manifest_sha256.hex() == newest.sha256
    assert status.reason == ""
