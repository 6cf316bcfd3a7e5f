"""The harness's values and the messages that carry them say the same."""

from etude.agent import messages
from etude.agent.completions import FinishReason
from etude.agent.rollout_message import to_rollout_message
from etude.agent.tool_calls import ParsedCall, ToolCall, call_from_json
from etude.agent.tools.base import ErrorKind, ToolOutcome
from etude.agent.trajectory import (
    CallRecord,
    ContextLink,
    PolicySpan,
    RolloutCosts,
    RolloutEnding,
    Trajectory,
)
from etude.common.weights import VersionId
from etude.v1 import environments_pb2, inference_pb2, rollout_pb2


def test_endings_have_the_numbers_of_the_wire() -> None:
    ours = {f"ENDING_{ending.name}": int(ending) for ending in RolloutEnding}
    theirs = dict(rollout_pb2.Ending.items())
    # A platform fault is raised, and the trainer writes it down, as it does a change that is too
    # large; a policy fault does not occur.
    for absent in ("UNSPECIFIED", "POLICY_FAULT", "PLATFORM_FAULT", "CHANGE_TOO_LARGE"):
        del theirs[f"ENDING_{absent}"]
    assert ours == theirs


def test_error_kinds_have_the_numbers_of_the_wire() -> None:
    ours = {f"TOOL_ERROR_KIND_{kind.name}": int(kind) for kind in ErrorKind if kind}
    theirs = dict(environments_pb2.ToolErrorKind.items())
    del theirs["TOOL_ERROR_KIND_UNSPECIFIED"]
    assert ours == theirs
    assert environments_pb2.ToolResult().error == int(ErrorKind.NONE)


def test_finish_reasons_have_the_numbers_of_the_wire() -> None:
    ours = {f"FINISH_REASON_{reason.name}": int(reason) for reason in FinishReason}
    theirs = dict(inference_pb2.FinishReason.items())
    del theirs["FINISH_REASON_UNSPECIFIED"]
    assert ours == theirs


def test_a_call_arrives_as_it_was_sent() -> None:
    message = messages.to_call_message(ToolCall("0.1", "grep", '{"pattern":"é"}'))
    assert message.call_id == "0.1"
    call = ParsedCall(name="grep", arguments={"pattern": "é"})
    assert call_from_json(message.name, message.arguments_json) == call


def test_a_result_arrives_as_it_was_sent() -> None:
    sent = ToolOutcome(
        content="é", kind=ErrorKind.TIMEOUT, omitted_bytes=2**40, cpu_ms=3, wall_ms=4
    )
    message = messages.to_result_message("0.1", sent)
    assert (message.call_id, message.is_error, message.wall_ms) == ("0.1", True, 4)
    assert messages.from_result_message(message) == sent


def test_a_trajectory_is_written_down_completely() -> None:
    old, new = VersionId(1, 3), VersionId(2, 4)
    link = ContextLink(
        token_ids=[1, 2, 3],
        loss_mask=b"\0\1\1",
        sampler_logprobs=[0.0, -0.5, -0.25],
        spans=[PolicySpan(1, 2, old, old), PolicySpan(2, 3, new, old)],
    )
    record = CallRecord(
        turn=0, name="grep", arguments_json="{}", result="x", is_error=True, is_malformed=True
    )
    costs = RolloutCosts(
        completion_tokens=2, turns=1, tool_calls=1, malformed_calls=1, tool_seconds=0.5
    )
    message = to_rollout_message(
        Trajectory(
            links=(link,),
            costs=costs,
            ending=RolloutEnding.TURN_LIMIT,
            final_message="Done.",
            calls=(record,),
        )
    )
    again = rollout_pb2.Rollout.FromString(message.SerializeToString())
    assert list(again.links[0].token_ids) == [1, 2, 3]
    assert again.links[0].loss_mask == b"\0\1\1"
    assert list(again.links[0].sampler_logprobs) == [0.0, -0.5, -0.25]
    assert [(s.start, s.end, s.sampled.number) for s in again.links[0].spans] == [
        (1, 2, 3),
        (2, 3, 4),
    ]
    assert VersionId.from_proto(again.oldest) == old
    assert VersionId.from_proto(again.newest) == new
    assert again.ending == rollout_pb2.ENDING_TURN_LIMIT
    assert (again.costs.completion_tokens, again.costs.tool_seconds) == (2, 0.5)
    assert (again.calls[0].name, again.calls[0].is_malformed) == ("grep", True)
    assert again.final_message == "Done."


def test_a_trajectory_without_samples_has_no_versions() -> None:
    message = to_rollout_message(
        Trajectory(links=(), costs=RolloutCosts(), ending=RolloutEnding.TIME_LIMIT)
    )
    assert not message.HasField("oldest")
