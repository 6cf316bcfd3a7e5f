"""Etude's side: the learner's policy step, completions by an engine through the engine client."""

import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from etude.agent.completions import Completion
from etude.common.api.storage import Storage
from etude.common.rpc import channels
from etude.common.rpc.server import Server
from etude.common.weights import VersionId
from etude.inference.service import SERVICES, InferenceServicer
from etude.inference.settings import EngineOptions
from etude.trainer.learner.batches import PolicyBatch, PolicySequence
from etude.trainer.learner.config import LearnerConfig
from etude.trainer.rollouts.engine_client import EngineSampler
from etude.trainer.rollouts.outage import OutageBudget
from etude.trainer.routing.router import Router
from etude.trainer.routing.table import EngineState, RoutingTable
from etude.v1 import inference_pb2_grpc
from learner_bench.side import Orders, StepReport, pin_threads, profile_operators
from learner_bench.workload import MODEL_LENGTH, SIBLINGS, StepLoad, Workload

MICROBATCH_TOKENS = 3_072
"""As many as TRL's microbatch of four rows has at most."""
PHASE = {
    "name": "rl",
    "type": "ReinforcementLearning",
    "maxSteps": 1_000,
    "optimizer": {"learningRate": "1e-6"},
    "tasks": [{"name": "train", "uri": "file:///tasks", "environment": "repos"}],
    "algorithm": {"name": "DrGRPO"},
}
TIMEOUT_S = 3_600.0


class EngineRollouts:
    """Samples completions by our engine client, from an engine behind gRPC in this process."""

    def __init__(self, target: str) -> None:
        self._channel = channels.dial(target)
        engines = ((target, EngineState.LIVE),)
        self._router = Router(table=RoutingTable(revision=1, engines=engines))

    async def sample(
        self, step: int, prompts: Sequence[Sequence[int]], load: StepLoad
    ) -> list[Completion]:
        """Sample all completions of a step at once."""
        return await asyncio.gather(
            *(
                self._sampler(step, place).generate(
                    prompts[place], max_tokens=length, temperature=1.0, seed=1_000 * step + place
                )
                for place, length in enumerate(load.lengths)
            )
        )

    def _sampler(self, step: int, place: int) -> EngineSampler:
        return EngineSampler(
            engine_of=lambda _: inference_pb2_grpc.InferenceServiceStub(self._channel),
            router=self._router,
            group_id=f"{step}-{place // SIBLINGS}",
            rollout_id=f"{step}-{place}",
            # Lengths are given: nothing else ends a completion.
            end_ids=frozenset(),
            outage=OutageBudget(TIMEOUT_S),
            timeout_s=TIMEOUT_S,
        )


def build_batch(
    prompts: Sequence[Sequence[int]], completions: Sequence[Completion], load: StepLoad
) -> PolicyBatch:
    """The batch of a step, as the controller builds it from rollouts of one turn."""
    sequences = []
    for place, (prompt, done) in enumerate(zip(prompts, completions, strict=True)):
        context = len(prompt)
        sequences.append(
            PolicySequence(
                token_ids=np.array([*prompt, *done.token_ids], np.int32),
                loss_mask=np.arange(context + len(done.token_ids)) >= context,
                sampler_logprobs=np.array([0.0] * context + [*done.logprobs], np.float32),
                rollout=place,
            )
        )
    return PolicyBatch(
        sequences=tuple(sequences),
        rewards=np.array(load.rewards),
        groups=np.arange(len(sequences)) // SIBLINGS,
        valid=np.ones(len(sequences), np.bool_),
    )


def engine_options(workload: Workload) -> EngineOptions:
    """Options as the SmolLM2 example has them; weights are the folder's."""
    return EngineOptions(
        model=Path(workload.model),
        served_name="bench",
        dtype="float32",
        max_model_len=MODEL_LENGTH,
        max_concurrent=len(workload.steps[0].lengths),
        kv_cache_bytes=640 << 20,
        gpus=0,
        follows_store=False,
        threads=workload.threads,
    )


async def serve(workload: Workload, orders: Orders, storage: Path) -> None:
    """Make steps until orders end."""
    options = engine_options(workload)
    os.environ.update(options.environment())
    # vLLM reads its environment when it is imported, and torch its own.
    from etude.inference.engine import replica  # noqa: PLC0415
    from etude.trainer.learner.learner import Learner  # noqa: PLC0415

    engine = replica.build_replica(options)
    await engine.relabel(VersionId(1, 0), drop_cache=False)
    server = Server(SERVICES)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(
        InferenceServicer(engine=engine, http_port=0), server.grpc_server
    )
    await server.start()
    rollouts = EngineRollouts(f"127.0.0.1:{server.port}")
    learner = Learner(
        LearnerConfig(
            run="bench",
            holder="bench",
            model_folder=Path(workload.model),
            storage=Storage(uri=storage.as_uri()),
            micro_batch_tokens=MICROBATCH_TOKENS,
            packing="Packed",
            threads=workload.threads,
        )
    )
    learner.start_phase(PHASE, 0)
    tokenizer = Tokenizer.from_file(str(Path(workload.model) / "tokenizer.json"))
    orders.report_ready()
    while (order := await asyncio.to_thread(orders.take)) is not None:
        load, report = workload.steps[order.step], StepReport()
        prompts = [tokenizer.encode(text).ids for text in load.prompts for _ in range(SIBLINGS)]
        with report.rollout.measure():
            completions = await rollouts.sample(order.step, prompts, load)
        report.rollout.tokens = sum(len(done.token_ids) for done in completions)
        with (
            report.train.measure(),
            profile_operators(report, enabled=order.is_profiled),
        ):
            result = learner.policy_step(build_batch(prompts, completions, load))
        report.train.tokens = result.tokens
        orders.answer(report)


def main() -> None:
    """Serve one workload."""
    workload, orders = Workload.read(Path(sys.argv[1])), Orders()
    pin_threads(workload.threads)
    with tempfile.TemporaryDirectory() as storage:
        asyncio.run(serve(workload, orders, Path(storage)))
        sys.stderr.flush()
        # As every engine's process ends: vLLM's threads wait for nobody.
        os._exit(0)


if __name__ == "__main__":
    main()
