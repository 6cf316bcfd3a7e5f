"""Requests that come in the middle of a swap wait for its end: nothing has failed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.weights.publishing import TrainedPolicy
from typing_extensions import override

from etude.common.weights import VersionRef
from etude.common.weights.tensors.schema import Schema, TensorSpec
from etude.inference.engine.fake import MemoryEngine, MemoryRanks
from etude.inference.engine.interface import EngineInfo

SCHEMA = Schema(
    grid=1, tensors=(TensorSpec(name="a.q_proj.weight", dtype="BF16", shape=(8, 6), split="rows"),)
)


class AskedRanks(MemoryRanks):
    """Notes what the engine says of itself while its ranks write."""

    engine: MemoryEngine
    said: list[str]

    @override
    async def call(self, method: str, *args: object) -> Sequence[Any]:
        answers = await super().call(method, *args)
        if method in {"activate", "undo"}:
            self.said.append(self.engine.failed)
        return answers


@pytest.mark.parametrize("goes_back", [False, True])
async def test_an_engine_does_not_say_that_it_failed_while_it_swaps(
    info: EngineInfo, tmp_path: Path, *, goes_back: bool
) -> None:
    ranks = AskedRanks(1)
    ranks.engine, ranks.said = MemoryEngine(info, ranks), []
    swap, policy = ranks.engine.swap, TrainedPolicy(SCHEMA)
    await swap.build_map(SCHEMA)
    old = None
    for number in range(2):
        policy.stage(tmp_path / "staged", old)
        target = VersionRef(
            epoch=1, number=number, manifest_sha256=f"{number:064x}", state=policy.state().hex()
        )
        await swap.prepare(tmp_path / "staged", target, base=swap.live)
        await swap.activate()
        old = {name: words.copy() for name, words in policy.words.items()}
        policy.step(1.0)
    if goes_back:
        await swap.restore()
    assert ranks.said == [""] * (3 if goes_back else 2)
