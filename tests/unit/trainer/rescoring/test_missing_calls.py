"""Rollouts whose calls are gone or damaged are left out by name, and others are scored."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from etude.common.api.run.phases import inherit_context
from etude.common.api.storage import Storage
from etude.common.blobs import MemoryStore
from etude.common.role_inputs import ResolvedRun
from etude.trainer.controller.run import Run
from etude.trainer.rescoring.rebuilding import ChangeRebuilder
from etude.trainer.rescoring.recorded_groups import TrainedGroup, read_trained_groups
from etude.trainer.rescoring.rescorer import GroupRescorer
from etude.trainer.rescoring.results import RescoreResults, Row, summarise
from etude.trainer.rollouts.client_pool import ClientPool
from etude.trainer.rollouts.protocol import WorkerConfig
from etude.trainer.rollouts.scoring import Scorer

SFT_STEPS = 4


async def rescore(store: MemoryStore, groups: list[TrainedGroup], folder: Path) -> list[Row]:
    """Score groups again whose tasks are gone, so that no service is asked."""
    config = WorkerConfig(
        run="run",
        model_folder=None,
        brokers={},
        templates={},
        rewards_target="127.0.0.1:1",
        score_timeout_s=1.0,
        storage=Storage(uri=folder.as_uri()),
        outage_s=1.0,
    )
    clients = ClientPool(config)
    rescorer = GroupRescorer(
        source=store,
        rebuilder=ChangeRebuilder(config=config, clients=clients),
        scorer=Scorer(clients.reward_stub(), 1.0, 1.0),
        results=RescoreResults(folder),
        storage=config.storage,
        parallel=2,
    )
    rows = [row async for rows in rescorer.rescore(groups, {}) for row in rows]
    await clients.close()
    return rows


async def test_one_missing_object_ends_nothing_and_is_named(
    make_world: Callable[..., Any], tmp_path: Path
) -> None:
    def prepare(run: Run) -> None:
        workers: Any = run.dispatcher.workers
        workers.final_message = lambda index: f"Done {index}."

    world = make_world()
    assert await world.train(prepare)
    store = world.store
    keys = sorted(key for key in store.objects if ".calls." in key and key.startswith("contents/"))
    lost, spoilt, cut = keys[0], keys[1], keys[3]
    del store.objects[lost]
    store.objects[spoilt] = bytes(len(store.objects[spoilt]))
    store.objects[cut] = store.objects[cut][:-1]

    run = ResolvedRun.model_validate({"name": "demo", "uid": "run", "spec": world.spec})
    phases = inherit_context(run.spec.phases)
    groups = read_trained_groups(store, phases, first=SFT_STEPS + 1, last=None)
    rows = await rescore(store, groups, tmp_path)

    names = [key.split("/")[-1].split(".")[0] for key in (lost, spoilt, cut)]
    found = {row["rollout_id"]: row["left_out"] for row in rows}
    assert len(found) == sum(len(each.records) for each in groups)
    assert {name for name, why in found.items() if why.startswith("its calls")} == set(names)
    assert lost in found[names[0]]
    summary = summarise(rows)
    assert sorted(summary["missing"]) == sorted(names)
    assert summary["left_out"] == len(rows)
