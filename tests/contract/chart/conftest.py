"""Helm for the tests here; without it they skip, or fail where the testbed is required."""

import pytest
from tests.support import needs
from tests.support.chart import helm


@pytest.fixture(scope="session", autouse=True)
def _helm_is_there() -> None:
    if not helm.program().exists():
        needs.skip("there is no helm: `python hack/testbed/build.py` builds it", "cluster")
