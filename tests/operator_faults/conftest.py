"""A control plane of these tests' own, with our CRDs, and a lab over it."""

from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.operator_faults.lab import Lab, laboratory
from tests.operator_faults.planes import installed
from tests.operator_faults.stories import References
from tests.support.kube import testbeds


@pytest.fixture(scope="session")
def plane() -> Iterator[Mapping[str, Any]]:
    """A control plane without a node."""
    for state in testbeds.cluster("apiserver"):
        installed(state)
        yield state


@pytest.fixture
async def lab(plane: Mapping[str, Any], tmp_path: Path) -> AsyncIterator[Lab]:
    async with laboratory(plane, tmp_path) as made:
        yield made


@pytest.fixture(scope="session")
def references() -> References:
    """What workloads come to without faults, as far as tests have needed that."""
    return {}
