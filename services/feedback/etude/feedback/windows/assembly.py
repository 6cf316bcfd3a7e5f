"""Assembly of a served rollout: records of its turns become token sequences to train on."""

import itertools
from collections.abc import Sequence

from etude.agent.rollout_message import to_rollout_message
from etude.agent.trajectory import LinkDraft, PolicySpan, RolloutCosts, RolloutEnding, Trajectory
from etude.common.errors import EtudeError
from etude.common.weights import VersionId
from etude.v1 import inference_pb2, rollout_pb2, turns_pb2


class UntrainableError(EtudeError):
    """A rollout cannot be trained on; it is masked with the reason."""

    def __init__(self, mask: str, what: str) -> None:
        super().__init__(what)
        self.mask = mask


def assemble_rollout(rollout: str, turns: Sequence[turns_pb2.TurnRecord]) -> rollout_pb2.Rollout:
    """Assemble the turns of a rollout; each of its branches becomes a link.

    Tokens that turns of a branch share stand in it once. What a branch repeats of the one that it
    was split off from is read, not trained again. Of side turns nothing is trained, and of turns
    whose tokens are withheld there is nothing: their branches end before them.

    Args:
        rollout: id of the rollout.
        turns: its records, those of each branch in their order.

    Raises:
        UntrainableError: records are missing or inconsistent, or nothing is left to train.
    """
    drafts: dict[str, LinkDraft] = {}
    costs = RolloutCosts()
    turns = [turn for turn in turns if not turn.HasField("withheld")]
    for turn in turns:
        is_new = turn.branch not in drafts
        draft = drafts.setdefault(turn.branch, LinkDraft.start(()))
        num_read = _append_prompt(draft, turn)
        if is_new:
            costs.prompt_tokens += num_read
        else:
            costs.tool_output_tokens += num_read
        _append_completion(draft, turn)
        if not turn.is_side:
            costs.turns += 1
            costs.completion_tokens += len(turn.token_ids)
    links = tuple(draft.finish() for draft in drafts.values() if draft.spans)
    if not links:
        raise UntrainableError("OnlySideTurns", "nothing in it is the policy's work")
    last = [turn for turn in turns if not turn.is_side][-1]
    is_cut = last.finish_reason == inference_pb2.FINISH_REASON_LENGTH
    message = to_rollout_message(
        Trajectory(
            links=links,
            costs=costs,
            ending=RolloutEnding.LENGTH_LIMIT if is_cut else RolloutEnding.STOPPED,
        )
    )
    message.rollout_id = rollout
    return message


def _append_prompt(draft: LinkDraft, turn: turns_pb2.TurnRecord) -> int:
    """Append what a turn read since the one before it in its branch; return its length.

    Raises:
        UntrainableError: the branch lacks tokens, or has others.
    """
    prompt, end = turn.prompt_token_ids, len(draft.token_ids)
    if turn.num_prefix_tokens > end:
        what = f"a branch has {end} tokens where a turn continues {turn.num_prefix_tokens}"
        raise UntrainableError("IncompleteTurns", what)
    # A record after one that was lost repeats the branch from its start.
    known = draft.token_ids[turn.num_prefix_tokens :]
    if prompt[: len(known)] != known:
        raise UntrainableError("MalformedTurns", "a turn repeats other tokens than its branch has")
    new = prompt[len(known) :]
    if not end and not new:
        raise UntrainableError("MalformedTurns", "a branch begins with a sampled token")
    if new and min(new) < 0:
        raise UntrainableError("MalformedTurns", "a token id is negative")
    draft.append_read(new)
    return len(new)


def _append_completion(draft: LinkDraft, turn: turns_pb2.TurnRecord) -> None:
    """Append the tokens that a turn sampled.

    Raises:
        UntrainableError: the record is inconsistent.
    """
    token_ids = turn.token_ids
    if not token_ids or len(turn.logprobs) != len(token_ids) or min(token_ids) < 0:
        raise UntrainableError("MalformedTurns", "tokens and log-probabilities do not match")
    if turn.is_side:
        draft.append_read(token_ids)
        return
    ends = [0, *(span.end for span in turn.spans)]
    starts = [*(span.start for span in turn.spans), len(token_ids)]
    if ends != starts or any(start >= end for start, end in itertools.pairwise(ends)):
        raise UntrainableError("MalformedTurns", "the spans of versions leave tokens out")
    spans = [
        PolicySpan(
            span.start,
            span.end,
            VersionId.from_proto(span.sampled),
            VersionId.from_proto(span.context),
            span.replica,
        )
        for span in turn.spans
    ]
    draft.append_sampled(token_ids, turn.logprobs, spans)
