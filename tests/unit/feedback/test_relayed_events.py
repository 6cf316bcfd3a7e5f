"""Messages of a queue: one that the service cannot read keeps no other from it."""

import pytest

from etude.common.feedback.events import split_batch
from etude.feedback.relays.incoming import find_problem

DEEP = [b'{"a":' * levels + b"1" + b"}" * levels for levels in range(197, 204)]


@pytest.mark.parametrize("message", [b"{}", b"{},{}", b"{}],[{}", b"", b"[]", b"1", *DEEP])
def test_a_message_that_passes_can_stand_in_a_batch(message: bytes) -> None:
    if not find_problem(message):
        assert len(split_batch(b'[{"a":1},' + message + b"]")) == 2


def test_messages_pass_up_to_the_levels_that_the_service_reads() -> None:
    assert find_problem(DEEP[0]) == ""
    assert find_problem(DEEP[-1]) == "InvalidEvent"
