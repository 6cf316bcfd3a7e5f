"""The real engine in this process, which follows the versions of a store."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from etude.common.blobs import Store
from etude.inference.settings import EngineOptions
from variants_bench.rollouts import MODEL_CONTEXT


@dataclass(frozen=True, slots=True)
class FollowingEngine:
    """A replica and its follower, whose modules read the environment when they are imported."""

    replica: Any
    follower: Any

    async def catch_up(self) -> None:
        """Activate the newest version."""
        await self.follower.catch_up()


def build_engine(model: Path, store: Store, scratch: Path, *, most: int) -> FollowingEngine:
    """Build an engine without weights; it has them once it has caught up.

    Args:
        model: folder of the configuration.
        store: of the run.
        scratch: for staged versions.
        most: requests at once.
    """
    options = EngineOptions(
        model=model,
        served_name="variants",
        dtype="float32",
        max_model_len=MODEL_CONTEXT,
        max_concurrent=most,
        kv_cache_bytes=256 << 20,
        gpus=0,
        follows_store=True,
        threads=1,
    )
    os.environ.update(options.environment())
    torch._dynamo.config.disable = True
    from etude.inference.engine import replica  # noqa: PLC0415 - reads the environment
    from etude.inference.status import ReplicaStatus  # noqa: PLC0415 - as above
    from etude.inference.updates.follower import VersionFollower  # noqa: PLC0415 - as above
    from etude.inference.updates.staging import Stager  # noqa: PLC0415 - as above

    engine = replica.build_replica(options)
    stager = Stager(store, "variants", scratch)
    status = ReplicaStatus(replica="variants")
    return FollowingEngine(engine, VersionFollower(stager=stager, engine=engine, status=status))
