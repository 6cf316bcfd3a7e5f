"""What no pattern can say is wrong with a moment."""

import pytest

from etude.common.api.pool import cron


@pytest.mark.parametrize(
    ("expression", "zone", "field"),
    [
        ("0 8 * * 1-5", "UTC", None),
        ("0 8 * * 1-5", "Europe/Berlin", None),
        ("0 8 * *", "UTC", "cron"),
        ("@daily", "UTC", "cron"),
        ("61 8 * * *", "UTC", "cron"),
        ("0 0 30 2 *", "UTC", "cron"),
        ("0 8 * * *", "Mars/Base", "timeZone"),
        ("0 8 * * *", "Europe", "timeZone"),
        ("0 8 * * *", "/etc/passwd", "timeZone"),
    ],
)
def test_what_is_wrong_with_a_moment_is_said_of_its_field(
    expression: str, zone: str, field: str | None
) -> None:
    found = cron.find_problem(expression, zone)
    assert (None if found is None else found.field) == field
