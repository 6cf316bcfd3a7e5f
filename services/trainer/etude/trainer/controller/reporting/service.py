"""RunService over gRPC: reports of a run, and commands to it."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
from typing_extensions import override

from etude.trainer.controller.reporting.commands import RunCommands
from etude.trainer.controller.reporting.reports import RunReports
from etude.v1 import run_pb2, run_pb2_grpc

NAME = "etude.v1.RunService"


@dataclass(slots=True)
class RunService(run_pb2_grpc.RunServiceServicer):
    """Translates between gRPC and the controller."""

    reports: RunReports
    orders: RunCommands

    @override
    async def WatchRun(
        self,
        request: run_pb2.WatchRunRequest,
        context: grpc.aio.ServicerContext[run_pb2.WatchRunRequest, run_pb2.WatchRunResponse],
    ) -> AsyncIterator[run_pb2.WatchRunResponse]:
        async for report in self.reports.watch(
            epoch=request.epoch, after_sequence=request.after_sequence
        ):
            yield report

    @override
    async def Command(
        self,
        request: run_pb2.CommandRequest,
        context: grpc.aio.ServicerContext[run_pb2.CommandRequest, run_pb2.CommandResponse],
    ) -> run_pb2.CommandResponse:
        self.orders.accept(request)
        return run_pb2.CommandResponse()
