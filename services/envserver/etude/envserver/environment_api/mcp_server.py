"""MCP server with the tools of sandboxes: /mcp/SANDBOX is one sandbox's.

Requests are stateless: the state is the sandbox's.
"""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc
import mcp_types
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.exceptions import MCPError
from mcp_types import INTERNAL_ERROR
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from etude.envserver.environment_api import tool_calls
from etude.envserver.environment_api.api_keys import ApiKeys, UnknownKeyError
from etude.envserver.environment_api.pool_client import PoolClient, public_error
from etude.envserver.environment_api.sandboxes import ClientSandbox, ClientSandboxes

_SANDBOX = "etude.sandbox"
_MAX_BODY_BYTES = 1 << 20

Context = ServerRequestContext[None, Request]


@dataclass(slots=True)
class McpServer:
    """Lists and calls the tools of sandboxes."""

    keys: ApiKeys
    pool: PoolClient
    sandboxes: ClientSandboxes
    _manager: StreamableHTTPSessionManager = field(init=False)

    def __post_init__(self) -> None:
        server: Server[None] = Server(
            "etude", version="1", on_list_tools=self._list, on_call_tool=self._call
        )
        self._manager = StreamableHTTPSessionManager(
            server, stateless=True, json_response=True, max_request_body_size=_MAX_BODY_BYTES
        )

    def routes(self) -> list[Route]:
        return [Route("/mcp/{name}", _Endpoint(self), methods=["GET", "POST", "DELETE"])]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve requests within this block."""
        async with self._manager.run():
            yield

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request of a client that may use the sandbox's tools."""
        request = Request(scope)
        scope[_SANDBOX] = self._admit(request)
        await self._manager.handle_request(scope, receive, send)

    def _admit(self, request: Request) -> ClientSandbox:
        sandbox = self.sandboxes.find(request.path_params["name"])
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            raise UnknownKeyError("give the sandbox's token for tools: Authorization: Bearer …")
        if not sandbox.is_tools_token(token):
            caller = self.keys.identify(token)
            return self.sandboxes.find_own(caller, sandbox.name)
        return sandbox

    async def _list(
        self, _: Context, __: mcp_types.PaginatedRequestParams | None
    ) -> mcp_types.ListToolsResult:
        return mcp_types.ListToolsResult(
            tools=[
                mcp_types.Tool(name=name, description=text, input_schema=dict(parameters))
                for name, text, parameters in tool_calls.tool_descriptions()
            ]
        )

    async def _call(
        self, context: Context, params: mcp_types.CallToolRequestParams
    ) -> mcp_types.CallToolResult:
        """Run a tool.

        Raises:
            MCPError: the platform failed; a tool's own refusal is an answer.
        """
        if context.request is None:
            raise MCPError(INTERNAL_ERROR, "the message did not come in an HTTP request")
        sandbox: ClientSandbox = context.request.scope[_SANDBOX]
        try:
            answer = await tool_calls.call_tool(
                self.pool, sandbox.lease, params.name, params.arguments or {}
            )
        except grpc.aio.AioRpcError as error:
            raise MCPError(INTERNAL_ERROR, public_error(error)[1]) from error
        content = mcp_types.TextContent(type="text", text=answer.text)
        return mcp_types.CallToolResult(content=[content], is_error=answer.is_error)


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """An ASGI application, which a route does not wrap as it would wrap a function."""

    server: McpServer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        await self.server.answer(scope, receive, send)
