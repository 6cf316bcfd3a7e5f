"""A real engine on two worker processes, as a program: prints what it saw as one line of JSON.

python -m tests.support.weights.parallel_engine tensor|pipeline FOLDER_OF_MODEL SCRATCH

A program, because vLLM spawns its workers, each of which imports the main module again; and
because its environment must hold the options' own before vLLM is imported.
"""

import asyncio
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tests.support.weights.followed_engine import Bench, Oracle, learn
from tests.support.weights.publishing import TrainedPolicy

from etude.common import weights
from etude.common.blobs import MemoryStore
from etude.common.errors import UnavailableError
from etude.inference.engine import replica
from etude.inference.settings import EngineOptions
from etude.inference.status import ReplicaStatus
from etude.inference.updates.follower import VersionFollower
from etude.inference.updates.staging import Stager

RUN = "uid-run"
RANKS = 2
DELTAS = 4


def options_of(model: Path) -> EngineOptions:
    """A small engine on the CPU."""
    return EngineOptions(
        model=model,
        served_name="tiny",
        dtype="float32",
        max_model_len=256,
        max_concurrent=8,
        kv_cache_bytes=64 << 20,
        gpus=0,
        follows_store=True,
        threads=1,
    )


def build(kind: str, options: EngineOptions) -> replica.Replica:
    """The engine, with its model spread over two workers."""
    of_one = replica.engine_args

    def of_two(options: EngineOptions) -> Mapping[str, Any]:
        ranks = {f"{kind}_parallel_size": RANKS, "distributed_executor_backend": "mp"}
        return {**of_one(options), **ranks}

    replica.engine_args = of_two
    return replica.build_replica(options)


def half_a_commit(worker: Any) -> None:
    """Have the second rank say no to its next commit, after it has written."""
    if worker.rank != RANKS - 1:
        return
    kind = type(worker._etude_rank)
    activate = kind.activate

    def refuse(rank: object) -> bool:
        kind.activate = activate
        activate(rank)
        return False

    kind.activate = refuse  # of this process alone


@dataclass
class Journey:
    """Which versions the engine was on, whether their bits were there, and what it sampled."""

    kind: str
    bench: Bench
    versions: list[tuple[str, bool]] = field(default_factory=list)
    sampled: int = 0
    refused: str = ""

    async def follow(self, *, complete: bool = False) -> None:
        """Publish one more, and serve it."""
        learn(self.bench.policy)
        self.bench.publish(complete=complete)
        await self.bench.receiver.catch_up()
        await self.look(self.bench.policy.state().hex())

    async def look(self, state: str) -> None:
        """Compare the live words with the state that they should have."""
        live = self.bench.engine.live
        assert live is not None
        self.versions.append((str(live), (await self.bench.engine.swap.scan()).hex() == state))
        if self.kind == "tensor":  # vLLM's CPU build cannot compute with pipeline ranks
            await self.bench.assert_exact(live)
            self.sampled += 1

    async def be_refused(self) -> None:
        """A version that one rank refuses half-way, and takes when it is offered again."""
        before = self.bench.policy.state().hex()
        learn(self.bench.policy)
        self.bench.publish()
        await self.bench.engine.llm.collective_rpc(half_a_commit)
        try:
            await self.bench.receiver.catch_up()
        except UnavailableError as error:
            self.refused = str(error)
        await self.look(before)
        await self.bench.receiver.catch_up()
        await self.look(self.bench.policy.state().hex())


async def main() -> None:
    """Build, follow, print."""
    kind, options = sys.argv[1], options_of(Path(sys.argv[2]))
    torch._dynamo.config.disable = True
    engine = build(kind, options)
    oracle, store = Oracle(options.model), MemoryStore()
    weights.claim_epoch(store, holder="t", parent=None, reason="start")
    stager = Stager(store, RUN, Path(sys.argv[3]))
    receiver = VersionFollower(stager=stager, engine=engine, status=ReplicaStatus(replica="r-0"))
    policy = TrainedPolicy(oracle.schema(), oracle.words())
    journey = Journey(kind, Bench(engine, receiver, policy, oracle, store))
    for number in range(1 + DELTAS):
        await journey.follow(complete=number == 0)
    await journey.be_refused()
    engine.shutdown()
    seen = {name: getattr(journey, name) for name in ("versions", "sampled", "refused")}
    sys.stdout.write(json.dumps(seen) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
