"""Environments of a node, called as a policy calls them."""

import json
from collections.abc import Callable

from etude.envserver.host.environment import LeasedEnvironment
from etude.envserver.host.host import Host
from etude.v1 import environments_pb2

Order = Callable[..., environments_pb2.OpenEnvironmentsRequest]

FIX = {"path": "shop/core.py", "old_string": "a - b", "new_string": "a + b"}
SPOIL = {"path": "shop/core.py", "old_string": "a + b", "new_string": "a * b"}


def call(call_id: str, name: str, **arguments: str) -> environments_pb2.ToolCall:
    return environments_pb2.ToolCall(
        call_id=call_id, name=name, arguments_json=json.dumps(arguments)
    )


async def opened(node: Host, order: Order, name: str = "a") -> LeasedEnvironment:
    (outcome,) = await node.open(order(name))
    assert outcome.HasField("lease"), outcome
    return node.find(name)


async def said(environment: LeasedEnvironment, *calls: environments_pb2.ToolCall) -> list[str]:
    return [result.content.decode() for result in await environment.run_turn(calls)]


async def content(environment: LeasedEnvironment) -> bytes:
    (written,) = (await environment.diff()).written
    return written.content
