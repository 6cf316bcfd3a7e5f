"""Windows of production rollouts as a feedback service writes them, with tokens that are drawn."""

import random
import time
from collections.abc import Iterable
from typing import Any

from blake3 import blake3

from etude.common.blobs import Store
from etude.common.feedback.windows import (
    WindowManifest,
    WindowRollout,
    create_window,
    encode_rollout,
    rollout_key,
)
from etude.common.weights import VersionId
from etude.v1 import rollout_pb2, weights_pb2

TENANT = "team"
PROMPT = [1, 2, 3]


def draw_rollout(draw: random.Random, policy: VersionId) -> rollout_pb2.Rollout:
    """One turn of a user's session, sampled by one version."""
    sampled = [draw.randrange(5, 20) for _ in range(draw.randrange(2, 8))]
    version = policy.to_proto()
    end = len(PROMPT) + len(sampled)
    span = weights_pb2.PolicySpan(
        sampled=version, context=version, start=len(PROMPT), end=end, replica="engine-0"
    )
    link = rollout_pb2.Link(
        token_ids=PROMPT + sampled,
        loss_mask=bytes(len(PROMPT)) + b"\x01" * len(sampled),
        sampler_logprobs=[0.0] * len(PROMPT) + [-0.5] * len(sampled),
        spans=[span],
    )
    return rollout_pb2.Rollout(
        rollout_id=f"{draw.getrandbits(128):032x}", links=[link], oldest=version, newest=version
    )


def store_rollout(
    store: Store, rollout: rollout_pb2.Rollout, *, user: str, reward: float, advantage: float
) -> WindowRollout:
    """Store a rollout, and return the entry of a window that lists it."""
    data = encode_rollout(rollout)
    store.put(rollout_key(TENANT, user, rollout.rollout_id), data)
    return WindowRollout(
        rollout=rollout.rollout_id,
        tenant=TENANT,
        user=user,
        digest=blake3(data).hexdigest(),
        stratum="python/edit/team",
        reward=reward,
        advantage=advantage,
        consent="2026-11",
    )


def write_window(
    store: Store,
    number: int,
    policy: VersionId,
    *,
    rollouts: int = 8,
    scale: float = 1.0,
    entries: Iterable[WindowRollout] | None = None,
    **changed: Any,
) -> WindowManifest:
    """Write a window; of drawn rollouts unless entries are given."""
    draw = random.Random(number)
    if entries is None:
        entries = [
            store_rollout(
                store,
                draw_rollout(draw, policy),
                user=f"{place % 3:032x}",
                reward=float(place % 2),
                advantage=scale * (place % 2 - 0.5),
            )
            for place in range(rollouts)
        ]
    now_ms = int(time.time() * 1000)
    manifest = WindowManifest(
        number=number,
        **{
            "run_uid": "run",
            "epoch": policy.epoch,
            "version": policy.number,
            "opened_ms": now_ms - 60_000,
            "closed_ms": now_ms,
            "last_sequence": number,
            "signals": {"thumb": 1},
            "rollouts": tuple(entries),
            **changed,
        },
    )
    return create_window(store, manifest)
