"""The operator beside as many pods as it has to bear: the bench's own cluster, with KWOK for nodes.

ETUDE_PODS says how many there are, 10,000 unless set. Figures go to bench/out/faults.json, and
times are for bench/operator_scale.py to judge, on a machine that does nothing else.
"""

import contextlib
import importlib
import os
from pathlib import Path

import pytest
from tests.support import figures, needs

BENCH = Path(__file__).parents[2] / "bench"
PODS = int(os.environ.get("ETUDE_PODS", "10000"))
MOST_MIB = 400
"""What the operator may hold at its peak."""
RUNS = 20


@pytest.mark.long
@pytest.mark.timeout(7_200)
async def test_p16_the_operator_bears_ten_thousand_pods_and_finds_them_as_it_left_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCH)
    measures = importlib.import_module("operator_bench.measures")
    scenes = importlib.import_module("operator_bench.scene")
    sft_run = importlib.import_module("operator_bench.manifests").sft_run
    async with contextlib.AsyncExitStack() as stack:
        try:
            made = await stack.enter_async_context(scenes.scene(tmp_path, pods=PODS, say=print))
        except RuntimeError as error:
            needs.skip(str(error), "cluster")
        created = await measures.created(made, [sft_run(f"rest-{n}") for n in range(RUNS)])
        pods_s = await measures.many_pods(made, PODS)
        peak_mib = made.operator.memory_mib("VmHWM")
        again = await measures.restarted(made)
        again_mib = made.operator.memory_mib("VmHWM")
        count = await made.api.count(scenes.PODS)
    figures.record(
        "faults",
        many_pods=count,
        many_pods_peak_mib=round(peak_mib, 1),
        many_pods_peak_mib_after_restart=round(again_mib, 1),
        many_pods_s=round(pods_s, 1),
        many_pods_reconcile_p99_ms=round(created.p99_ms, 1),
        many_pods_restart_s=round(again.seconds, 1),
        many_pods_restart_writes=again.writes,
    )
    assert count >= PODS
    assert max(peak_mib, again_mib) <= MOST_MIB
    assert again.writes == 0, "an operator that comes back finds nothing to do"
