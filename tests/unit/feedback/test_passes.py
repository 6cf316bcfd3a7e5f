"""Passes of blocking work are repeated, and long ones pause in proportion."""

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.feedback.passes import find_pause_s, repeat_passes


@given(st.floats(0, 1e4), st.floats(0.01, 1))
def test_passes_and_their_pauses_keep_the_share(used_s: float, share: float) -> None:
    pause_s = find_pause_s(used_s, share)
    assert used_s == pytest.approx(share * (used_s + pause_s))


@pytest.mark.parametrize("share", [1.0, 1e-6])
async def test_a_pass_that_took_its_share_of_a_core_is_not_repeated_at_once(share: float) -> None:
    stop, began, passes = asyncio.Event(), asyncio.Event(), 0
    notify = asyncio.get_running_loop().call_soon_threadsafe

    def run_pass() -> None:
        nonlocal passes
        passes += 1
        notify(began.set)
        began_s = time.thread_time()
        while time.thread_time() - began_s < 0.002:
            pass
        if passes == 3:
            notify(stop.set)

    loop = asyncio.create_task(repeat_passes(run_pass, stop, wait_s=0, what="work", share=share))
    if share < 1:
        await began.wait()
        await asyncio.sleep(0.1)
        stop.set()
    await loop
    assert passes >= 3 if share == 1 else passes == 1
