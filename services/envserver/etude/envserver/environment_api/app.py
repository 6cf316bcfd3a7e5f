"""The ASGI application with all routes of the environment API."""

from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from etude.common.errors import UnknownIdError
from etude.common.http_server import RequestLimits
from etude.envserver.environment_api.api_keys import ApiKeys
from etude.envserver.environment_api.e2b import envd_processes
from etude.envserver.environment_api.e2b.control_plane import E2bControlPlane, SandboxSize
from etude.envserver.environment_api.e2b.envd_files import EnvdFiles
from etude.envserver.environment_api.mcp_server import McpServer
from etude.envserver.environment_api.middleware import error_handlers, max_body_bytes
from etude.envserver.environment_api.openenv.routes import OpenEnvServer
from etude.envserver.environment_api.pool_client import PoolClient
from etude.envserver.environment_api.sandboxes import ClientSandbox, ClientSandboxes


@dataclass(frozen=True, slots=True)
class EnvdRoutes:
    """Routes of envd, which elsewhere runs in each sandbox: a header names the sandbox here."""

    pool: PoolClient
    sandboxes: ClientSandboxes

    def routes(self) -> list[Route]:
        return [
            Route("/process.Process/{method}", self._process, methods=["POST"]),
            Route("/filesystem.Filesystem/{method}", self._filesystem, methods=["POST"]),
            Route("/files", self._download, methods=["GET"]),
            Route("/files", self._upload, methods=["POST"]),
            Route("/health", self._health, methods=["GET"]),
        ]

    async def _process(self, request: Request) -> Response:
        sandbox = self._sandbox(request)
        return await envd_processes.answer_rpc(sandbox, request.path_params["method"], request)

    async def _filesystem(self, request: Request) -> Response:
        files = EnvdFiles(self.pool, self._sandbox(request))
        return await files.call(request.path_params["method"], request)

    async def _download(self, request: Request) -> Response:
        files = EnvdFiles(self.pool, self._sandbox(request))
        data = await files.download(request.query_params.get("path", ""))
        return Response(data, media_type="application/octet-stream")

    async def _upload(self, request: Request) -> Response:
        files = EnvdFiles(self.pool, self._sandbox(request))
        return JSONResponse(await files.upload(request))

    async def _health(self, request: Request) -> Response:
        try:
            self._sandbox(request)
        except UnknownIdError as error:
            # Its clients take 502 for a sandbox that has ended.
            return JSONResponse({"code": 502, "message": str(error)}, 502)
        return Response(status_code=204)

    def _sandbox(self, request: Request) -> ClientSandbox:
        found = self.sandboxes.find(request.headers.get("e2b-sandbox-id", ""))
        found.check_token(request.headers.get("x-access-token", ""))
        return found


def build_application(
    keys: ApiKeys, pool: PoolClient, sandboxes: ClientSandboxes, mcp: McpServer, size: SandboxSize
) -> ASGIApp:
    """Build the application of the environment API."""
    routes = [
        *mcp.routes(),
        *OpenEnvServer(keys, pool, sandboxes).routes(),
        *E2bControlPlane(keys, sandboxes, size).routes(),
        *EnvdRoutes(pool, sandboxes).routes(),
    ]
    return RequestLimits(
        Starlette(routes=routes, exception_handlers=error_handlers()), max_body_bytes
    )
