"""Copies of model folders with a head of multi-token prediction."""

import json
from pathlib import Path

import pytest
import torch
from tests.support.trainer.mtp_folder import write_mtp_config
from tests.support.warm_etude import etude
from transformers import AutoModelForCausalLM

from etude.common.model_sources.mtp_head import HeadRefusedError, add_mtp_head
from etude.trainer.model.mtp.heads import find_heads, start_heads
from etude.trainer.model.policy import load_policy


@pytest.fixture(params=["1GB", "8KB"])
def plain(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model without a head, in one file of weights or several."""
    folder = write_mtp_config(tmp_path / "plain", architectures=None, num_nextn_predict_layers=None)
    policy = load_policy(folder, seed=1)
    policy.model.to(torch.bfloat16).save_pretrained(folder, max_shard_size=request.param)
    return folder


def test_the_copy_is_the_model_with_a_head_that_starts_as_its_last_block(
    plain: Path, tmp_path: Path
) -> None:
    done = etude("model", "add-head", str(plain), "--to", str(tmp_path / "with"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == str(tmp_path / "with")
    policy = load_policy(tmp_path / "with", seed=2)
    original = load_policy(plain, seed=3).model.state_dict()
    found = policy.model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in original.items())
    start_heads(policy.model)
    assert find_heads(policy.model)
    expected = policy.model.state_dict()
    assert expected.keys() > original.keys()
    loaded = load_policy(tmp_path / "with", seed=2).model.state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())
    # Programs that know no head load the model all the same.
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "with").state_dict()
    assert all(torch.equal(other[n].float(), value) for n, value in original.items())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "qwen3"}, "type qwen3"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"num_nextn_predict_layers": 1}, "has a head already"),
        ({"hidden_size": "wide"}, "lacks sizes"),
    ],
)
def test_a_model_that_can_have_no_head_is_refused(
    plain: Path, tmp_path: Path, change: dict[str, object], words: str
) -> None:
    config = json.loads((plain / "config.json").read_text()) | change
    (plain / "config.json").write_text(json.dumps(config))
    with pytest.raises(HeadRefusedError, match=words):
        add_mtp_head(plain, tmp_path / "with")
    assert not (tmp_path / "with").exists()


def test_a_folder_with_files_is_not_written_to(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(HeadRefusedError, match="is not empty"):
        add_mtp_head(plain, plain)
