"""The time of a demo that was stopped and resumed."""

from pathlib import Path

from etude.cli.demo.stopwatch import read_stopwatch, record_session


def test_time_between_two_sessions_is_not_counted(tmp_path: Path) -> None:
    record_session(tmp_path, "started", 100.0)
    record_session(tmp_path, "ended", 150.0)
    record_session(tmp_path, "started", 1_000.0)
    record_session(tmp_path, "ended", 1_040.0)
    times = read_stopwatch(tmp_path, signs=[120.0, 149.0, 1_010.0])
    assert times.seconds_before(120.0) == 20.0
    assert times.seconds_before(500.0) == 50.0
    assert times.seconds_before(1_010.0) == 60.0
    assert times.total_s == 90.0


def test_a_killed_session_ends_with_its_last_sign_of_work(tmp_path: Path) -> None:
    record_session(tmp_path, "started", 100.0)
    record_session(tmp_path, "started", 1_000.0)
    times = read_stopwatch(tmp_path, signs=[120.0, 149.0, 1_010.0])
    assert times.seconds_before(1_000.0) == 49.0
    assert times.total_s == 59.0


def test_a_session_without_any_sign_took_no_time(tmp_path: Path) -> None:
    record_session(tmp_path, "started", 100.0)
    assert read_stopwatch(tmp_path, signs=[]).total_s == 0.0


def test_a_folder_without_notes_is_timed_by_its_record(tmp_path: Path) -> None:
    assert read_stopwatch(tmp_path, signs=[5.0, 9.0]).total_s == 4.0
