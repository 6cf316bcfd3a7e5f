"""Records of turns as the gateway writes them."""

from collections.abc import Sequence

from tests.support.feedback.events import TERMS

from etude.common.blobs import Store
from etude.common.release.channels import ChannelRecord, ServedVersion, append_record
from etude.common.turns import turn_log
from etude.common.weights import VersionId
from etude.v1 import inference_pb2, turns_pb2, weights_pb2

V1 = VersionId(1, 1)


def turn(  # noqa: PLR0913 - one for each field that tests vary
    user: str,
    rollout: str = "r-1",
    *,
    started_ms: int,
    branch: str = "b",
    prefix: int = 0,
    prompt: Sequence[int] = (1, 2, 3),
    sampled: Sequence[int] = (4, 5),
    version: VersionId = V1,
    is_side: bool = False,
    tenant: str = "acme",
    run_uid: str = "run-1",
) -> turns_pb2.TurnRecord:
    """One turn."""
    span = weights_pb2.PolicySpan(
        sampled=version.to_proto(), context=version.to_proto(), start=0, end=len(sampled)
    )
    return turns_pb2.TurnRecord(
        turn_id=f"{user}-{rollout}-{branch}-{prefix}",
        rollout_id=turn_log.identify_rollout(tenant, user, rollout),
        branch=branch,
        tenant=tenant,
        user=user,
        consent=TERMS,
        arm="stable",
        is_side=is_side,
        time_unix_nanos=started_ms * 1_000_000,
        config_hash=b"0123456789abcdef",
        num_prefix_tokens=prefix,
        prompt_token_ids=prompt,
        token_ids=sampled,
        logprobs=[-0.5] * len(sampled),
        spans=[span],
        finish_reason=inference_pb2.FINISH_REASON_STOP,
        run_uid=run_uid,
    )


def write_turns(store: Store, turns: Sequence[turns_pb2.TurnRecord], writer: str = "w") -> None:
    """Write turns as one object of a writer of its own, or behind its others."""
    first = 0
    for info in store.list(f"{turn_log.PREFIX}{writer}/"):
        first = int(info.key[-16:-4])
        first += len(turn_log.decode_segment(store.get(info.key), where=info.key).turns)
    segment = turns_pb2.TurnSegment(writer=writer, first=first, turns=turns)
    store.create(turn_log.segment_key(writer, first), turn_log.encode_segment(segment))


def serve_version(store: Store, version: VersionId = V1, *, number: int = 1) -> None:
    """Record that the stable channel serves a version."""
    served = ServedVersion(run_uid="run-1", epoch=version.epoch, number=version.number)
    append_record(
        store,
        ChannelRecord(
            channel="stable",
            number=number,
            served=served,
            action="Promote",
            sentence="",
            decided_ms=1,
        ),
    )
