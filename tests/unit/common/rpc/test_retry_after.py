"""When to ask a full peer again."""

import grpc
import pytest
from grpc_status import rpc_status

from etude.common.errors import EtudeError, FullError, UnavailableError
from etude.common.rpc.retry_after import LEAST_S, MOST_S, retry_after_s
from etude.common.rpc.server import rich_status


def refused(error: EtudeError) -> grpc.aio.AioRpcError:
    """As a client sees it."""
    status = rpc_status.to_status(rich_status(error))
    return grpc.aio.AioRpcError(
        status.code,
        grpc.aio.Metadata(),
        grpc.aio.Metadata(*status.trailing_metadata),
        status.details,
    )


@pytest.mark.parametrize(
    ("asked_s", "least", "most"),
    [(0.0, LEAST_S, 0.1), (2.0, 2.0, 3.0), (1e6, MOST_S, 90.0), (1e9, MOST_S, 90.0)],
)
def test_a_full_peer_is_asked_again_when_it_says_or_a_little_later(
    asked_s: float, least: float, most: float
) -> None:
    times = {retry_after_s(refused(FullError("full", retry_after_s=asked_s))) for _ in range(20)}

    assert all(each is not None and least <= each <= most for each in times)
    assert len(times) > 1


def test_no_other_refusal_is_repeated() -> None:
    assert retry_after_s(refused(UnavailableError("away"))) is None


@pytest.mark.parametrize("details", [b"", b"\xff\xff", b"\x08\x05"])
def test_details_that_make_no_sense_are_no_time(details: bytes) -> None:
    metadata = grpc.aio.Metadata(("grpc-status-details-bin", details))
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, "full")

    assert retry_after_s(error) is None
