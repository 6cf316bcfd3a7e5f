"""A test whose machine lacks something is skipped, but never where its suite is required."""

import pytest
from tests.support import needs


@pytest.mark.parametrize("lacks", [needs.machines, needs.containers])
def test_nothing_is_skipped_where_it_is_required(
    monkeypatch: pytest.MonkeyPatch, lacks: needs.Need
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("ETUDE_REQUIRE", raising=False)
    with pytest.raises(pytest.skip.Exception):
        lacks()
    monkeypatch.setenv("ETUDE_REQUIRE", "qemu")
    with pytest.raises(pytest.fail.Exception):
        lacks()
