"""Loading a checkpoint finds what reading it back cannot."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from etude.common.api.run.roles import Lora
from etude.common.api.storage import Storage
from etude.common.blobs import Store, open_store
from etude.common.checkpoints import manifest as checkpoints_manifest
from etude.common.checkpoints.job import EXIT_CORRUPT, VARIABLE, verify_checkpoint
from etude.common.checkpoints.manifest import CONTROLLER, MANIFEST, CheckpointManifest
from etude.common.errors import CorruptError
from etude.common.process import EXIT_TRY_AGAIN
from etude.trainer.commands import check_checkpoint
from etude.trainer.controller.checkpoints.state import ControllerState, Cursor, Figures
from etude.trainer.controller.journal.ledger import LedgerState
from etude.trainer.learner.batches import SupervisedSequence
from etude.trainer.learner.config import LearnerConfig
from etude.trainer.learner.learner import Learner

TINY = Path(__file__).parents[3] / "data" / "tiny-model"
SFT = {
    "name": "sft",
    "type": "SupervisedFineTuning",
    "maxSteps": 50,
    "optimizer": {"learningRate": "1e-2"},
    "data": [{"name": "traces", "uri": "file:///traces.jsonl"}],
}
STATE = ControllerState(
    run="uid",
    epoch=1,
    cursor=Cursor(phase="sft", step=1, global_step=1),
    figures=Figures(),
    ledger=LedgerState(),
    sequence=1,
    seeds={"sft": 0},
)


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A checkpoint of one step of the tiny model, at its prefix; adapters are a parameter."""
    learner = Learner(
        LearnerConfig(
            run="uid",
            holder="test",
            model_folder=TINY,
            storage=Storage(uri=f"file://{tmp_path}/run"),
            lora=getattr(request, "param", None),
        )
    )
    learner.start_phase(SFT, 0)
    ids = np.arange(12, dtype=np.int32)
    learner.supervised_step([SupervisedSequence(token_ids=ids, weights=np.ones(12, np.float32))])
    learner.copy_state("000001/001/learner")
    learner.save("000001/001/learner")
    found = open_store(f"file://{tmp_path}/run")
    found.put(f"000001/001/{CONTROLLER}", STATE.model_dump_json().encode())
    return found


def registered(store: Store) -> str:
    """The digest of a manifest over what lies in the store now."""
    keys = [info.key for info in store.list("") if info.key != MANIFEST]
    manifest = CheckpointManifest(
        run="uid",
        step=1,
        phase="sft",
        phase_step=1,
        epoch=1,
        policy_version=0,
        reason="Scheduled",
        objects=[checkpoints_manifest.describe_object(store, "", key) for key in keys],
    )
    data = manifest.model_dump_json().encode()
    store.put(MANIFEST, data)
    return hashlib.sha256(data).hexdigest()


def tiny() -> Store:
    return open_store(f"file://{TINY}")


@pytest.mark.parametrize(
    "store", [None, Lora(rank=2)], indirect=True, ids=["all weights", "adapters"]
)
def test_what_a_learner_saved_can_be_loaded(store: Store) -> None:
    check_checkpoint.load(store, registered(store), model=tiny())
    check_checkpoint.load(store, registered(store), model=None)


def of_another_model(store: Store) -> None:
    config = json.loads((TINY / "config.json").read_text())
    config["intermediate_size"] *= 2
    store.put("model/config.json", json.dumps(config).encode())


def of_another_format(store: Store) -> None:
    state = json.loads(STATE.model_dump_json())
    store.put(f"000001/001/{CONTROLLER}", json.dumps({**state, "format": 2}).encode())


def without_an_index(store: Store) -> None:
    store.delete(["000001/001/learner/00000.json"])


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (of_another_model, "the model has"),
        (of_another_format, "controller.json"),
        (without_an_index, r"00000\.json: missing"),
    ],
)
def test_what_is_whole_and_cannot_be_gone_on_from_is_corrupt(
    store: Store, harm: Callable[[Store], None], words: str
) -> None:
    harm(store)
    digest = registered(store)
    verify_checkpoint(store, digest, depth="Checksums")
    with pytest.raises(CorruptError, match=words):
        check_checkpoint.load(store, digest, model=tiny())


def test_a_model_that_is_gone_is_named(store: Store, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CorruptError, match=r"empty/config\.json: is missing"):
        check_checkpoint.load(
            store, registered(store), model=open_store(f"file://{tmp_path}/empty")
        )


def ended(store: Store, digest: str, model: str, capsys: pytest.CaptureFixture[str]) -> int:
    order = {
        "action": "verify",
        "uri": store.url,
        "digest": digest,
        "storage": {"uri": store.url},
        "depth": "Load",
        "model": model,
    }
    try:
        check_checkpoint.main({VARIABLE: json.dumps(order)})
    except SystemExit as ending:
        assert capsys.readouterr().err
        return int(str(ending.code))
    return 0


def test_the_exit_code_says_what_came_of_it(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = registered(store)
    assert ended(store, digest, f"file://{TINY}", capsys) == 0
    assert ended(store, digest, f"file://{tmp_path}/nowhere", capsys) == EXIT_TRY_AGAIN
    without_an_index(store)
    assert ended(store, digest, f"file://{TINY}", capsys) == EXIT_CORRUPT
