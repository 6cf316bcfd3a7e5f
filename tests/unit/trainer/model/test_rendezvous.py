"""The address at which learner ranks meet."""

import socket
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest
from torch._C._distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from etude.trainer.model import fsdp


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_its_port_is_taken_from_the_moment_that_ranks_are_told(host: str) -> None:
    opened = fsdp.open_rendezvous(host)
    url = urlsplit(opened.url)
    assert (url.scheme, url.hostname) == ("tcp", host)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as other, pytest.raises(OSError, match="in use"):
        other.bind((host, url.port))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_ranks_share_its_store(host: str) -> None:
    opened = fsdp.open_rendezvous(host)

    def meet(rank: int) -> Store:
        store, _, _ = next(rendezvous(opened.url, rank, 2))
        found: Store = store
        return found

    with ThreadPoolExecutor() as threads:
        first, second = threads.map(meet, range(2))
    first.set("key", "value")
    assert second.get("key") == opened.store.get("key") == b"value"
