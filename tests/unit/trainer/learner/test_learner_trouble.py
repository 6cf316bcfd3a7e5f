"""What a learner rank raises reaches the controller as it was raised, unless a rank was lost."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ObjectLostError, RayError, RayTaskError

from etude.common.errors import StoreError
from etude.trainer.learner.protocol import LearnerLostError
from etude.trainer.ray_backend import RayLearners

Call = Callable[[], Awaitable[Any]]


def learners(*calls: Call) -> RayLearners:
    """Ranks that answer to copy_state as given."""
    starting: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
    starting.set_result(
        [
            SimpleNamespace(copy_state=SimpleNamespace(remote=lambda _, call=call: call()))
            for call in calls
        ]
    )
    return RayLearners(starting)


def raising(cause: Exception) -> Call:
    async def fail() -> None:
        traceback = "Traceback (most recent call last): ..."
        error = RayTaskError("copy_state", traceback, cause, ip="10.0.0.1")
        raise error.as_instanceof_cause()

    return fail


def losing(error: RayError) -> Call:
    async def fail() -> None:
        await asyncio.sleep(0.01)
        raise error

    return fail


async def copying() -> list[Any]:
    return []


async def test_an_error_of_a_rank_keeps_its_message_without_the_ranks_traceback() -> None:
    with pytest.raises(StoreError) as caught:
        await learners(raising(StoreError("the bucket is gone"))).copy_state("checkpoint/")
    assert str(caught.value) == "the bucket is gone"
    assert isinstance(caught.value.__cause__, RayTaskError)


@pytest.mark.parametrize("loss", [ActorDiedError(), ObjectLostError("0" * 56, None, "")])
async def test_a_collective_that_fails_for_want_of_a_peer_is_the_loss_of_that_peer(
    loss: RayError,
) -> None:
    closed = raising(RuntimeError("Connection closed by peer"))
    with pytest.raises(LearnerLostError, match="learner rank 1 died in copy_state"):
        await learners(closed, losing(loss)).copy_state("checkpoint/")
    with pytest.raises(LearnerLostError):
        await learners(copying, losing(loss)).copy_state("checkpoint/")


async def test_an_error_without_a_loss_stays_what_it_was() -> None:
    for others in ([], [copying], [raising(RuntimeError("also"))]):
        with pytest.raises(RuntimeError, match="CUDA out of memory"):
            await learners(raising(RuntimeError("CUDA out of memory")), *others).copy_state(
                "checkpoint/"
            )
