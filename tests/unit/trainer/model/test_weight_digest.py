"""The digest of a step changes with every weight, and not with the number of ranks."""

from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.common.weights.tensors import digest
from etude.kernels.digest import digest_lanes, digest_scan
from etude.trainer.model import tensor_bits
from etude.trainer.model.fsdp import RankGroup
from etude.trainer.model.parameters import parameters_by_name
from etude.trainer.model.policy import load_policy
from etude.trainer.model.weight_digest import weight_digest

MODEL = Path(__file__).parents[3] / "data" / "tiny-model"
ALONE = RankGroup(rank=0, size=1, device=torch.device("cpu"))


def test_the_digest_is_the_one_of_all_weights_in_a_row() -> None:
    policy = load_policy(MODEL, seed=3)
    flat = torch.cat([p.detach().flatten() for p in parameters_by_name(policy).values()])
    found = weight_digest(policy, ALONE)
    assert found == digest.scan(tensor_bits.to_words(flat, dtype=torch.float32), 0).hex()
    # A GPU computes it by other code.
    assert found == digest.Digest(*digest_lanes(digest_scan(flat, first_lane=0))).hex()


@settings(max_examples=10)
@given(data=st.data())
def test_one_changed_bit_of_any_weight_changes_the_digest(data: st.DataObject) -> None:
    policy = load_policy(MODEL, seed=3)
    before = weight_digest(policy, ALONE)
    parameter = data.draw(st.sampled_from(sorted(parameters_by_name(policy).items())))[1]
    with torch.no_grad():
        bits = parameter.view(torch.int32).view(-1)
        bits[data.draw(st.integers(0, bits.numel() - 1))] ^= 1 << data.draw(st.integers(0, 31))
    assert weight_digest(policy, ALONE) != before
