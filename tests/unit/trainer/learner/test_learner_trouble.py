"""What a learner rank raises reaches the controller as it was raised."""

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from etude.common.errors import StoreError
from etude.trainer.ray_backend import RayLearners


async def test_an_error_of_a_rank_keeps_its_message_without_the_ranks_traceback() -> None:
    async def fail(_: object) -> None:
        traceback = "Traceback (most recent call last): ..."
        error = RayTaskError("save", traceback, StoreError("the bucket is gone"), ip="10.0.0.1")
        raise error.as_instanceof_cause()

    rank: Any = SimpleNamespace(save=SimpleNamespace(remote=fail))
    with pytest.raises(StoreError) as caught:
        await RayLearners([rank], []).save("checkpoints/")
    assert str(caught.value) == "the bucket is gone"
    assert isinstance(caught.value.__cause__, RayTaskError)
