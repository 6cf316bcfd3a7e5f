"""Run in a trainer's pod: prints what its first engine says that it serves, in hexadecimal."""

import asyncio
import os
import sys

from etude.common.rpc import channels
from etude.v1 import weights_pb2, weights_pb2_grpc


async def ask() -> None:
    """One question, with the trainer's own certificate."""
    target = os.environ["ETUDE_INFERENCE_TARGETS"].split(",")[0]
    async with channels.dial(target) as channel:
        stub = weights_pb2_grpc.WeightServiceStub(channel)
        request = weights_pb2.GetWeightStatusRequest()
        answer = await stub.GetWeightStatus(request, timeout=30)
    sys.stdout.write(answer.status.SerializeToString().hex())


if __name__ == "__main__":
    asyncio.run(ask())
