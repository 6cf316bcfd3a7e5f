"""The message of a finished rollout."""

from typing import cast

from etude.agent.trajectory import ContextLink, Trajectory
from etude.v1 import rollout_pb2, weights_pb2


def to_rollout_message(trajectory: Trajectory) -> rollout_pb2.Rollout:
    """A finished rollout as a message; the caller adds its ids, its diff and its trace."""
    costs = trajectory.costs
    message = rollout_pb2.Rollout(
        links=[_link_message(link) for link in trajectory.links],
        costs=rollout_pb2.Costs(
            prompt_tokens=costs.prompt_tokens,
            completion_tokens=costs.completion_tokens,
            tool_output_tokens=costs.tool_output_tokens,
            thinking_tokens=costs.thinking_tokens,
            final_message_tokens=costs.final_message_tokens,
            summary_tokens=costs.summary_tokens,
            tool_calls=costs.tool_calls,
            malformed_calls=costs.malformed_calls,
            turns=costs.turns,
            tool_seconds=costs.tool_seconds,
            token_seconds=costs.token_seconds,
        ),
        ending=cast("rollout_pb2.Ending", int(trajectory.ending)),
        final_message=trajectory.final_message,
        calls=[
            rollout_pb2.CallRecord(
                turn=call.turn,
                name=call.name,
                arguments_json=call.arguments_json,
                result=call.result,
                is_error=call.is_error,
                is_malformed=call.is_malformed,
            )
            for call in trajectory.calls
        ],
    )
    if trajectory.oldest is not None and trajectory.newest is not None:
        message.oldest.CopyFrom(trajectory.oldest.to_proto())
        message.newest.CopyFrom(trajectory.newest.to_proto())
    return message


def _link_message(link: ContextLink) -> rollout_pb2.Link:
    return rollout_pb2.Link(
        token_ids=link.token_ids,
        loss_mask=link.loss_mask,
        sampler_logprobs=link.sampler_logprobs,
        spans=[
            weights_pb2.PolicySpan(
                sampled=span.sampled.to_proto(),
                context=span.context.to_proto(),
                start=span.start,
                end=span.end,
                replica=span.replica,
            )
            for span in link.spans
        ],
    )
