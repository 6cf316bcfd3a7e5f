"""What a learner rank needs of its host: nothing but a way to the store."""

from pathlib import Path

import pytest

from etude.common.api.run.roles import TrainerRole
from etude.common.api.storage import Storage
from etude.common.blobs import open_store
from etude.common.errors import UserError
from etude.common.stores import WEIGHT_SUFFIXES, find_model_folder, local_folder
from etude.common.weights import VersionId
from etude.common.weights.protocol.epochs import create_epoch
from etude.trainer.learner.config import LearnerConfig
from etude.trainer.learner.learner import Learner
from etude.trainer.learner.rank import LearnerRank

MODEL = Path(__file__).parents[3] / "data" / "tiny-model"


def config(folder: Path, **fields: object) -> LearnerConfig:
    given = {
        "run": "uid",
        "holder": "test",
        "model_folder": MODEL,
        "storage": Storage(uri=f"file://{folder}/run"),
        **fields,
    }
    return LearnerConfig(**given)  # type: ignore[arg-type]


def test_weights_are_read_from_a_store_that_the_folder_has_no_copy_of(tmp_path: Path) -> None:
    source = Learner(config(tmp_path, seed=7))
    source.export("model")
    found = Learner(config(tmp_path, seed=1, model_uri=f"file://{tmp_path}/run/model"))
    exported = Learner(config(tmp_path, model_folder=tmp_path / "run" / "model"))
    assert found.digest() == exported.digest() != Learner(config(tmp_path, seed=1)).digest()


@pytest.mark.usefixtures("s3_credentials")
def test_a_download_leaves_the_weights_out(tmp_path: Path, moto_endpoint: str) -> None:
    storage = Storage(uri="s3://etude/model", endpoint=moto_endpoint)
    store = open_store("s3://etude/model", endpoint=moto_endpoint)
    for name in ("config.json", "model.safetensors", "model.safetensors.index.json"):
        store.put(name, b"{}")
    folder = local_folder("s3://etude/model", tmp_path, storage, leave_out=WEIGHT_SUFFIXES)
    assert [path.name for path in folder.iterdir()] == ["config.json"]


def test_the_axes_of_the_mesh_make_up_all_ranks(tmp_path: Path) -> None:
    assert TrainerRole.model_validate(
        {"learnerRanks": 8, "mesh": {"shard": 4, "replicate": 2}}
    ).mesh
    mesh = {"shard": 2, "replicate": 2, "context": 2}
    assert TrainerRole.model_validate({"learnerRanks": 8, "mesh": mesh}).mesh
    for other in ({"shard": 4}, {**mesh, "context": 4}):
        with pytest.raises(ValueError, match=r"times mesh\.context must be learnerRanks"):
            TrainerRole.model_validate({"learnerRanks": 8, "mesh": other})
    with pytest.raises(ValueError, match="3 replicas of 4 ranks"):
        config(tmp_path, world_size=4, replicas=3)
    with pytest.raises(ValueError, match="4 context ranks of 4 ranks in 2 replicas"):
        config(tmp_path, world_size=4, replicas=2, context=4)
    with pytest.raises(ValueError, match="4 expert ranks of 4 ranks in 2 replicas"):
        config(tmp_path, world_size=4, replicas=2, expert=4)
    assert TrainerRole.model_validate({"learnerRanks": 8, "mesh": {**mesh, "expert": 4}}).mesh
    with pytest.raises(ValueError, match=r"mesh\.expert must divide shard times context"):
        TrainerRole.model_validate({"learnerRanks": 8, "mesh": {**mesh, "expert": 8}})
    with pytest.raises(ValueError, match="2 ranks need a rendezvous"):
        Learner(config(tmp_path, world_size=2))


def test_ranks_share_packed_rows_and_no_padded_ones() -> None:
    with pytest.raises(ValueError, match=r"mesh\.context above 1 shares packed rows"):
        TrainerRole.model_validate(
            {"learnerRanks": 2, "mesh": {"shard": 1, "context": 2}, "packing": "Padded"}
        )


@pytest.mark.usefixtures("s3_credentials")
def test_another_host_fetches_the_tokenizer_from_the_store(
    tmp_path: Path, moto_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    storage = Storage(uri="s3://etude/other", endpoint=moto_endpoint)
    open_store(storage.uri, endpoint=moto_endpoint).put("tokenizer.json", b"{}")
    found = find_model_folder(Path("/not/on/this/host"), storage.uri, storage)
    assert (found / "tokenizer.json").read_bytes() == b"{}"
    assert find_model_folder(MODEL, storage.uri, storage) == MODEL


def test_a_folder_that_is_not_on_this_host_is_refused_by_its_name(tmp_path: Path) -> None:
    storage = Storage(uri="s3://etude/run")
    missing = r"(?s)model\.uri: file:///not/on/this/host  is not on host .*every node"
    with pytest.raises(UserError, match=missing):
        find_model_folder(Path("/not/on/this/host"), "", storage)
    # A folder of the same name on another host: what the controller wrote is not there.
    rank = LearnerRank(config(tmp_path))
    rank.load()
    with pytest.raises(UserError, match=r"storage\.uri: .* is another folder for learner rank 0"):
        rank.encode(VersionId(1, 0), None)
    create_epoch(open_store(f"file://{tmp_path}/run"), holder="test", parent=None, reason="start")
    assert rank.encode(VersionId(1, 0), None).is_complete
