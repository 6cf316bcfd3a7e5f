"""`etude feedback sql` as a user types it."""

import csv
import io
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.support.stores import s3_servers
from tests.support.warm_etude import etude

from etude.common.blobs import Store, open_store
from etude.common.feedback.tables import PartPlace

EVENTS: Mapping[str, Sequence[tuple[str, str, float | None]]] = {
    "2026-11-26": [("a", "shown", 1.0), ("b", "thumb\x1b[2J", None)],
    "2026-11-27": [("a", "accepted", 2.5)],
}
COUNT = "SELECT user, count(*) AS n FROM events GROUP BY user ORDER BY user"


def fill(store: Store) -> None:
    """Three events of two days."""
    for day, rows in EVENTS.items():
        columns = [pa.array(column) for column in zip(*rows, strict=True)]
        table = pa.table(columns, names=["user", "kind", "score"])
        data = io.BytesIO()
        pq.write_table(table, data)
        store.put(PartPlace("events", day).key, data.getvalue())
    store.put("windows/000000000001.json", b"{}")


@pytest.fixture
def store(tmp_path: Path) -> str:
    (tmp_path / "the store").mkdir()
    url = f"file://{tmp_path}/the%20store"
    fill(open_store(url))
    return url


def ask(question: str, url: str, *options: str) -> "subprocess.CompletedProcess[str]":
    return etude("feedback", "sql", question, "--store", url, *options, env={"COLUMNS": "200"})


def test_an_answer_is_a_table_csv_or_json(store: str) -> None:
    lines = ask(COUNT, store).stdout.split("\n")
    assert [line.split() for line in lines[:3]] == [["user", "n"], ["a", "2"], ["b", "1"]]
    rows = list(csv.reader(io.StringIO(ask(COUNT, store, "--csv").stdout)))
    assert rows == [["user", "n"], ["a", "2"], ["b", "1"]]
    found = ask("SELECT kind, score FROM events ORDER BY kind", store, "--json").stdout
    assert list(map(json.loads, found.splitlines())) == [
        {"kind": "accepted", "score": 2.5},
        {"kind": "shown", "score": 1.0},
        {"kind": "thumb\x1b[2J", "score": None},
    ]


def test_figures_that_are_no_numbers_are_text_in_json(store: str) -> None:
    found = ask("SELECT 'nan'::DOUBLE AS a, '-inf'::DOUBLE AS b", store, "--json").stdout
    assert json.loads(found, parse_constant=pytest.fail) == {"a": "nan", "b": "-inf"}


def test_two_columns_of_one_name_are_no_object_in_json(store: str) -> None:
    done = ask("SELECT 1 AS a, 2 AS b, 3 AS a", store, "--json")
    assert (done.returncode, done.stdout) == (4, "")
    assert "has several columns named a" in done.stderr
    assert ask("SELECT 1 AS a, 2 AS a", store, "--csv").stdout.split() == ["a,a", "1,2"]


@pytest.mark.parametrize("option", [(), ("--csv",), ("--json",)])
def test_an_answer_does_nothing_to_a_terminal(store: str, option: tuple[str, ...]) -> None:
    assert "\x1b[2J" not in ask("SELECT kind FROM events", store, *option).stdout


def test_a_bucket_answers_as_a_folder_does(moto_endpoint: str) -> None:
    env = {**s3_servers.CREDENTIALS, "ETUDE_FEEDBACK_STORE": "s3://etude/route"}
    words = ("feedback", "sql", COUNT, "--csv", "--endpoint", moto_endpoint)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_servers.CREDENTIALS.items():
            patch.setenv(name, value)
        fill(open_store("s3://etude/route", endpoint=moto_endpoint))
    done = etude(*words, env=env)
    assert done.stdout.split() == ["user,n", "a,2", "b,1"], done.stderr


def test_rows_and_days_can_be_fewer(store: str) -> None:
    cut = ask("SELECT * FROM events", store, "--limit", "2", "--json")
    assert len(cut.stdout.splitlines()) == 2
    assert "only the first 2 rows: --limit shows more" in cut.stderr
    whole = ask("SELECT * FROM events", store, "--limit", "3", "--json")
    assert (len(whole.stdout.splitlines()), whole.stderr) == (3, "")
    late = ask("SELECT kind FROM events", store, "--since", "2026-11-27", "--csv")
    assert late.stdout.split() == ["kind", "accepted"]


def test_what_there_is_can_be_asked_for(store: str) -> None:
    assert ask("SHOW TABLES", store, "--csv").stdout.split() == ["name", "events"]
    assert "score,DOUBLE" in ask("DESCRIBE events", store, "--csv").stdout


@pytest.mark.parametrize(
    "question",
    [
        "SELECT * FROM read_text('/etc/hostname')",
        "SELECT * FROM read_csv('http://127.0.0.1:1/x.csv')",
        "SELECT * FROM glob('/etc/*')",
        "SELECT * FROM '{folder}/windows/000000000001.json'",
        "SELECT * FROM table_of_this_program",
        "COPY events TO '{part}'",
        "EXPLAIN ANALYZE COPY events TO '{part}' (USE_TMP_FILE false)",
        "ATTACH '{folder}/new.db'",
        "DROP VIEW events",
        "CREATE TABLE t AS SELECT 1",
        "SET lock_configuration = false",
        "SET enable_external_access = true",
        "INSTALL httpfs",
        "PRAGMA database_list",
        "SELECT 1; SELECT 2",
        "SELECT 1; COPY events TO '{part}'",
        "SELEC 1",
        "SELECT nothing FROM events",
        "",
    ],
)
def test_a_question_reads_the_tables_and_does_nothing_else(store: str, question: str) -> None:
    folder = Path(store.removeprefix("file://").replace("%20", " "))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    part = folder / PartPlace("events", "2026-11-27").key
    done = ask(question.format(folder=folder, part=part), store)
    assert (done.returncode, done.stdout) == (4, ""), done.stderr
    assert "fix: ask in DuckDB's SQL; 'SHOW TABLES'" in done.stderr
    assert "Traceback" not in done.stderr
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_question_without_an_end_is_given_up(store: str) -> None:
    endless = "SELECT count(*) FROM range(1000000000000) a, range(1000000) b"
    done = ask(endless, store, "--timeout", "0.2")
    assert done.returncode == 7
    assert "has no answer after 0.2 s" in done.stderr


@pytest.mark.parametrize(
    ("url", "since", "code", "problem"),
    [
        ("file:///nowhere/at/all", "2026-01-01", 4, "/nowhere/at/all"),
        ("{store}", "2027-01-01", 3, "has no tables since 2027-01-01"),
        ("ftp://x", "2026-01-01", 4, "ftp://x"),
        ("{store}", "yesterday", 2, "--since"),
    ],
)
def test_a_wrong_place_or_day_is_named(
    store: str, url: str, since: str, code: int, problem: str
) -> None:
    done = ask(COUNT, url.format(store=store), "--since", since)
    assert done.returncode == code, done.stderr
    assert problem in done.stderr


def test_a_damaged_part_is_no_stack_trace(store: str, tmp_path: Path) -> None:
    (tmp_path / "the store" / PartPlace("events", "2026-11-27").key).write_bytes(b"PAR1 no PAR1")
    done = ask(COUNT, store)
    assert done.returncode == 4
    assert "Traceback" not in done.stderr
