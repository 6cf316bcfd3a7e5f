"""Calls and freezes that come in any order."""

import asyncio
import contextlib
import random

import pytest
from tests.support.vm.scripted_vm import REPLY, ScriptedSleeper

from etude.common.errors import UnavailableError
from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.drivers.vm.start.start_scheduler import RunSlots
from etude.envserver.drivers.vm.suspend.auto_suspend import AutoSuspendingVm
from etude.envserver.drivers.vm.suspend.idle_policy import IdleTimeouts, PowerState, PowerStep
from etude.envserver.guest.calls import GuestRequest
from etude.envserver.guest.channel import GuestLostError
from etude.v1 import guest_pb2

HASTY = IdleTimeouts(linger_s=0.0, job_s=0.0, frozen_s=0.0)
NEVER = IdleTimeouts(linger_s=3600.0, job_s=3600.0, frozen_s=3600.0)
LIMIT_S = 60


def request() -> GuestRequest:
    return GuestRequest(operation=guest_pb2.GuestCall())


async def resting(
    machine: ScriptedSleeper, patience: IdleTimeouts = HASTY, places: RunSlots | None = None
) -> AutoSuspendingVm:
    places = places or RunSlots(4, wait_limit_s=60)
    await places.take()
    return AutoSuspendingVm(machine, places, timeouts=patience)


async def becomes(guest: AutoSuspendingVm, state: PowerState) -> None:
    async with asyncio.timeout(LIMIT_S):
        while guest.state is not state:  # noqa: ASYNC110 - there is no event for tests alone
            await asyncio.sleep(0)


@pytest.mark.parametrize("seed", range(60))
async def test_calls_are_answered_whatever_the_vm_does_meanwhile(seed: int) -> None:
    dice = random.Random(seed)
    machine, places = ScriptedSleeper(dice), RunSlots(1, wait_limit_s=60)
    guest = await resting(machine, places=places)

    async def caller() -> None:
        for _ in range(10):
            for _ in range(dice.randrange(12)):
                await asyncio.sleep(0)
            assert await guest.call(request()) == REPLY

    async with asyncio.timeout(LIMIT_S):
        callers = [asyncio.create_task(caller()) for _ in range(4)]
        for task in callers:
            if dice.random() < 0.3:
                for _ in range(dice.randrange(20)):
                    await asyncio.sleep(0)
                task.cancel()
        await asyncio.wait(callers)
    for task in callers:
        with contextlib.suppress(asyncio.CancelledError):
            task.result()
    await becomes(guest, PowerState.SAVED)
    assert places.taken == 0
    assert await guest.call(request()) == REPLY
    await guest.destroy()
    assert places.taken == 0


@pytest.mark.parametrize("seed", range(60))
async def test_failures_are_told_to_who_waits_and_nobody_waits_for_ever(seed: int) -> None:
    dice = random.Random(seed)
    machine, places = ScriptedSleeper(dice, fails=lambda _: dice.random() < 0.2), RunSlots(2, 60)
    guest = await resting(machine, places=places)
    outcomes = []

    async def caller() -> None:
        for _ in range(10):
            for _ in range(dice.randrange(12)):
                await asyncio.sleep(0)
            try:
                await guest.call(request())
                outcomes.append("answered")
            except UnavailableError as error:
                outcomes.append(str(error))

    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(*(caller() for _ in range(4)))
    assert len(outcomes) == 40
    fallen = [
        step for step in (PowerStep.FREEZE, PowerStep.THAW) if guest.state is PowerState.ENDED
    ]
    if fallen:
        with pytest.raises(GuestLostError):
            await guest.call(request())
        assert places.taken == 0
    await guest.destroy()
    assert places.taken == 0


@pytest.mark.parametrize("seed", range(30))
async def test_an_end_in_the_middle_of_anything_is_the_end(seed: int) -> None:
    dice = random.Random(seed)
    machine, places = ScriptedSleeper(dice), RunSlots(1, wait_limit_s=60)
    guest = await resting(machine, places=places)
    callers = [asyncio.create_task(guest.call(request())) for _ in range(3)]
    for _ in range(dice.randrange(30)):
        await asyncio.sleep(0)
    async with asyncio.timeout(LIMIT_S):
        await guest.destroy()
        await asyncio.wait(callers)
    for task in callers:
        assert task.exception() is None or isinstance(task.exception(), GuestLostError)
    assert machine.is_ended
    assert guest.state is PowerState.ENDED
    assert places.taken == 0
    with pytest.raises(GuestLostError):
        await guest.call(request())
    await guest.destroy()


async def test_who_goes_while_the_vm_wakes_does_not_stop_it_for_others() -> None:
    machine = ScriptedSleeper(random.Random(1))
    guest = await resting(machine)
    await becomes(guest, PowerState.SAVED)
    first, second = (asyncio.create_task(guest.call(request())) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    async with asyncio.timeout(LIMIT_S):
        assert await second == REPLY
    await guest.destroy()


async def test_a_restore_that_failed_is_tried_again_by_the_next_call() -> None:
    failing = [True]
    machine = ScriptedSleeper(fails=lambda step: step is PowerStep.RESTORE and failing[0])
    guest = await resting(machine)
    await becomes(guest, PowerState.SAVED)
    for _ in range(2):
        with pytest.raises(GuestLostError, match="restore fails"):
            await guest.call(request())
        assert guest.state is PowerState.SAVED
    failing[0] = False
    assert await guest.call(request()) == REPLY
    await guest.destroy()


async def test_a_vm_that_cannot_be_saved_stays_in_memory() -> None:
    machine = ScriptedSleeper(fails=lambda step: step is PowerStep.SAVE)
    guest = await resting(machine, IdleTimeouts(linger_s=0.0, frozen_s=3600.0))
    with pytest.raises(VmmError, match="save fails"):
        await guest.suspend()
    assert guest.state is PowerState.FROZEN
    assert await guest.call(request()) == REPLY
    await guest.destroy()


async def test_rest_saves_at_once_and_a_call_brings_it_back() -> None:
    machine = ScriptedSleeper(random.Random(3))
    guest = await resting(machine, NEVER)
    assert await guest.call(request()) == REPLY
    await guest.suspend()
    await guest.suspend()
    assert machine.steps == [PowerStep.FREEZE, PowerStep.SAVE]
    assert await guest.call(request()) == REPLY
    assert guest.state is PowerState.RUNNING
    await guest.destroy()


async def test_a_vm_with_a_command_in_its_background_goes_on() -> None:
    machine = ScriptedSleeper()
    guest = await resting(machine, IdleTimeouts(linger_s=0.01, job_s=3600.0))
    machine.on_jobs(1)
    await asyncio.sleep(0.03)
    assert guest.state is PowerState.RUNNING
    machine.on_jobs(0)
    await becomes(guest, PowerState.FROZEN)
    await guest.destroy()


async def test_the_clock_is_set_for_who_stood_still_for_long() -> None:
    for drift_s, sets_clock in ((0.0, True), (3600.0, False)):
        machine = ScriptedSleeper()
        guest = await resting(machine, IdleTimeouts(linger_s=0.0, drift_s=drift_s))
        await becomes(guest, PowerState.FROZEN)
        await asyncio.sleep(0.001)
        await guest.call(request())
        assert machine.clocks == [sets_clock]
        await guest.destroy()


async def test_a_vm_waits_for_a_place_before_it_runs() -> None:
    places = RunSlots(1, wait_limit_s=60)
    one, other = ScriptedSleeper(), ScriptedSleeper()
    first = await resting(one, NEVER, places)
    second = AutoSuspendingVm(other, places, state=PowerState.SAVED, timeouts=NEVER)
    other.where = "saved"
    call = asyncio.create_task(second.call(request()))
    for _ in range(100):
        await asyncio.sleep(0)
    assert other.steps == []
    await first.suspend()
    async with asyncio.timeout(LIMIT_S):
        assert await call == REPLY
    await first.destroy()
    await second.destroy()
    assert places.taken == 0
