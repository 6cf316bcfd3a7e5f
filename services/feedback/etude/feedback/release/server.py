"""The gRPC port of a feedback service, and the canary loop of its releases."""

import asyncio
from dataclasses import dataclass
from typing import Self

from etude.common.api_keys import ApiKeyFile
from etude.common.rpc.server import Server
from etude.feedback.clock import LedgerClock
from etude.feedback.ledger.ledger import FeedbackLedger
from etude.feedback.passes import LARGEST_SHARE, repeat_passes
from etude.feedback.release.release_log import ReleaseLog
from etude.feedback.release.rollouts import CanaryRollouts
from etude.feedback.release.rules import ReleaseSettings, read_rules
from etude.feedback.release.service import ReleaseService
from etude.feedback.release.task import CanaryLoop
from etude.feedback.turn_keys import TurnKeyService
from etude.v1 import feedback_pb2_grpc, release_pb2_grpc, turns_pb2_grpc

SERVICES = ("etude.v1.ReleaseService", "etude.v1.TurnKeyService", "etude.v1.FeedbackService")


@dataclass(slots=True)
class ReleaseServer:
    """Answers requests about releases and for keys, takes events, and watches the canary."""

    loop: CanaryLoop
    server: Server

    @classmethod
    async def start(
        cls,
        settings: ReleaseSettings,
        ledger: FeedbackLedger,
        keys: ApiKeyFile,
        events: feedback_pb2_grpc.FeedbackServiceServicer,
    ) -> Self:
        """Read rules and decisions, and take requests.

        Raises:
            CorruptError: a decision or a record of a channel is damaged.
            OSError: the port is taken.
            StoreError: the store did not answer.
            UserError: the rules cannot be read, or requests would leave the machine unencrypted.
        """
        rules = read_rules(settings.rules_file)
        releases = await asyncio.to_thread(ReleaseLog.open, ledger.log.store, rules)
        clock = LedgerClock(releases.newest.decided_ms if releases.newest else 0)
        rollouts = CanaryRollouts(ledger, settings.horizon_s)
        server = Server(SERVICES, settings.host, settings.port)
        service = ReleaseService(releases, clock, keys, settings.trusts_network)
        release_pb2_grpc.add_ReleaseServiceServicer_to_server(service, server.grpc_server)
        keys_of_turns = TurnKeyService(ledger)
        turns_pb2_grpc.add_TurnKeyServiceServicer_to_server(keys_of_turns, server.grpc_server)
        feedback_pb2_grpc.add_FeedbackServiceServicer_to_server(events, server.grpc_server)
        await server.start()
        await server.set_ready()
        return cls(CanaryLoop(releases, rollouts, clock), server)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve and look at the canary until told to stop.

        Raises:
            FencedError: another service decides for this route.
        """
        try:
            wait_s = self.loop.releases.rules.interval_seconds
            await repeat_passes(
                self.loop.run_pass,
                stop,
                wait_s=wait_s,
                what="looks at the canary",
                share=LARGEST_SHARE,
            )
        finally:
            await self.server.stop()
