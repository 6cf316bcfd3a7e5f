"""The state digest against Python integers."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from etude.kernels import dispatch
from etude.kernels.digest import digest_lanes, digest_scan

EXAMPLES = settings(
    max_examples=10 if dispatch.INTERPRETED else 60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
WORDS = {8: np.uint8, 16: np.uint16, 32: np.uint32}


@EXAMPLES
@given(
    bits=st.sampled_from([8, 16, 32]),
    numbers=st.lists(st.integers(0, 2**32 - 1), max_size=80),
    lane=st.sampled_from([0, 1, 7, 2**31, 2**61]),
)
def test_a_digest_is_the_sum_of_its_lanes_mixes(bits, numbers, lane, device, digests):
    words = np.array(numbers, np.uint64).astype(WORDS[bits])
    lanes = [lane + i * max(1, bits // 16) for i in range(words.size)]
    seen = digest_scan(torch.from_numpy(words).to(device), first_lane=lane)
    assert digest_lanes(seen) == digests.of(words.tolist(), lanes, bits)


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_parts_add_up_to_the_whole_beyond_one_program(bits, device, digests):
    rng = np.random.default_rng(bits)
    words = rng.integers(0, 1 << bits, 70_001, dtype=np.uint64).astype(WORDS[bits])
    tensor, step = torch.from_numpy(words).to(device), max(1, bits // 16)
    whole = digest_scan(tensor, first_lane=5)
    cut = 32_768 + 3
    low = digest_scan(tensor[:cut], first_lane=5)
    high = digest_scan(tensor[cut:].clone(), first_lane=5 + cut * step)
    assert torch.equal(low + high, whole)
    lanes = range(5, 5 + words.size * step, step)
    assert digest_lanes(whole) == digests.of(words.tolist(), lanes, bits)


def test_a_view_of_any_format_is_read_as_its_bits(device):
    values = torch.tensor([0.0, -0.0, float("nan"), 1e-40], device=device)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        tensor = values.to(dtype)
        raw = tensor.view({1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[tensor.itemsize])
        assert torch.equal(digest_scan(tensor), digest_scan(raw))


def test_what_is_no_word_or_no_lane_is_refused(device):
    with pytest.raises(ValueError, match="8, 16 or 32 bits"):
        digest_scan(torch.zeros(3, dtype=torch.float64, device=device))
    with pytest.raises(ValueError, match="not contiguous"):
        digest_scan(torch.zeros(4, 4, device=device).t())
    with pytest.raises(ValueError, match="first_lane"):
        digest_scan(torch.zeros(4, device=device), first_lane=-1)
