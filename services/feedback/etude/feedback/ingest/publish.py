"""FeedbackService: events over gRPC, by the same rules as over HTTP."""

import time
from dataclasses import dataclass
from typing import Any

import grpc
from typing_extensions import override

from etude.common.api_keys import ApiKeyFile, KeyScope, read_bearer, require_scope
from etude.common.errors import InvalidFieldError
from etude.common.feedback.events import MAX_BATCH_EVENTS
from etude.feedback import metrics
from etude.feedback.ingest.intake import EventIntake
from etude.v1 import feedback_pb2, feedback_pb2_grpc


@dataclass(slots=True)
class FeedbackService(feedback_pb2_grpc.FeedbackServiceServicer):
    """Answers holders of API keys; where there are certificates, they need one too."""

    keys: ApiKeyFile
    intake: EventIntake

    @override
    async def Publish(
        self,
        request: feedback_pb2.PublishRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> feedback_pb2.PublishResponse:
        started_s = time.monotonic()
        metadata = {str(name): value for name, value in context.invocation_metadata() or ()}
        key = read_bearer(str(metadata.get("authorization", "")))
        owner = self.keys.identify(key)
        require_scope(owner, KeyScope.FEEDBACK, KeyScope.USERS)
        items = list(request.events)
        if len(items) > MAX_BATCH_EVENTS:
            raise InvalidFieldError("events", f"has more than {MAX_BATCH_EVENTS} events")
        self.keys.count(key, len(items))
        answers = await self.intake.take(items, owner)
        metrics.ACKNOWLEDGE_SECONDS.observe(time.monotonic() - started_s)
        return feedback_pb2.PublishResponse(
            results=[
                feedback_pb2.EventResult(
                    id=each.event_id, status=each.status, reason=each.reason, message=each.message
                )
                for each in answers
            ]
        )
