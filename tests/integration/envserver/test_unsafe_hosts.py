"""A node may say that it is anywhere; the broker does not go there in the clear."""

import pytest

from etude.common.tls.transport import security_from_setting
from etude.envserver.broker.host_client import GrpcHostClient, HostCallError
from etude.v1 import environments_pb2


async def test_a_host_that_cannot_be_spoken_to_safely_fails_alone() -> None:
    nodes, elsewhere = GrpcHostClient(security_from_setting("")), "10.9.9.9:7030"
    with pytest.raises(HostCallError, match="InvalidTls"):
        await nodes.open(elsewhere, environments_pb2.OpenEnvironmentsRequest())
    with pytest.raises(HostCallError, match="InvalidTls"):
        await nodes.close(elsewhere, ["lease"])
