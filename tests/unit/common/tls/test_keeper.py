"""When a keeper asks again, and how it puts files where others read them."""

import datetime
from pathlib import Path

import pytest
from tests.support import pki

from etude.common.tls import keeper, material
from etude.common.tls.identity import Identity

NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
HOUR = datetime.timedelta(hours=1)
WHO = Identity(domain="etude.dev", namespace="lab", run="demo", role="trainer")


@pytest.mark.parametrize(
    ("clock", "hours"),
    [
        (NOW, 16),
        (NOW - 12 * HOUR, 16),  # a clock that is behind sees more life than there is
        (NOW + 12 * HOUR, 8),
    ],
)
def test_a_certificate_is_replaced_with_a_third_of_its_life_left(
    clock: datetime.datetime, hours: int
) -> None:
    assert keeper.renewal_s(NOW, NOW + 24 * HOUR, clock) == pytest.approx(hours * 3_600)


def test_who_sees_it_ended_at_birth_does_not_ask_without_pause() -> None:
    late = NOW + 25 * HOUR
    assert keeper.renewal_s(NOW, NOW + 24 * HOUR, late) == keeper.LONGEST_DELAY_S


def test_a_keeper_that_was_killed_while_it_wrote_goes_on_after_that(tmp_path: Path) -> None:
    authority = pki.Authority()
    keeper.put(tmp_path, authority.issue(WHO))
    (tmp_path / "..data.new").symlink_to("..gone")
    half = tmp_path / "..half"
    half.mkdir()
    (half / "tls.key").write_bytes(b"a key that nobody needs")
    files = authority.issue(WHO)
    keeper.put(tmp_path, files)
    assert material.read(tmp_path).certificate == files["tls.crt"]
    left = [path for path in tmp_path.iterdir() if path.is_dir() and not path.is_symlink()]
    assert [path.resolve() for path in left] == [(tmp_path / "..data").resolve()]
