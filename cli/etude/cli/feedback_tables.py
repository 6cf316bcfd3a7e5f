"""Questions in SQL to the tables of a feedback service: read only, and without files or network.

DuckDB runs in this process. It may open the parts of the tables, and nothing else: its access is
closed and its configuration locked before the question is read.
"""

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import duckdb

from etude.common.api.storage import StoreAccess
from etude.common.blobs import MissingError, Store
from etude.common.errors import Problem, UserError
from etude.common.feedback.tables import PREFIX, PartPlace
from etude.common.store_urls import folder_of
from etude.common.stores import open_source

_DOWNLOADS = 8
"""At a time."""
_SAFE = {
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    # Variables of this program are no tables.
    "python_enable_replacements": False,
}


class Answer(NamedTuple):
    """Rows that answer a question."""

    columns: Sequence[str]
    rows: Sequence[tuple[Any, ...]]
    is_cut: bool
    """There were more rows than asked for."""


@contextmanager
def open_tables(
    uri: str, access: StoreAccess, *, since: str
) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open the tables of a store as views.

    Args:
        uri: folder or bucket of the feedback service.
        access: to the bucket.
        since: first day whose parts are read, such as "2026-11-27"; empty for all.

    Raises:
        StoreError: the store did not answer.
        UserError: there are no tables.
    """
    store = open_source(uri, access)
    with TemporaryDirectory(prefix="etude-feedback-") as scratch:
        folder = folder_of(uri) or _download(store, since, Path(scratch) / "parts")
        files = _find_files(store, folder, since)
        if not files:
            raise UserError(_no_tables(uri, since))
        with duckdb.connect(":memory:", config={**_SAFE, "temp_directory": scratch}) as database:
            paths = [path for table in files.values() for path in table]
            database.execute("SET allowed_paths = $paths", {"paths": paths})
            database.execute("SET enable_external_access = false")
            database.execute("SET lock_configuration = true")
            for name, parts in files.items():
                database.read_parquet(parts).create_view(name)
            yield database


def ask(
    database: duckdb.DuckDBPyConnection, question: str, *, limit: int, timeout_s: float
) -> Answer:
    """Answer one SELECT.

    Args:
        database: as `open_tables` gives it.
        question: one statement that reads.
        limit: rows at most.
        timeout_s: time after which the question is given up.

    Raises:
        UserError: the question is no such statement, fails, or takes too long.
    """
    timer = threading.Timer(timeout_s, database.interrupt)
    timer.start()
    try:
        statements = database.extract_statements(question)
        if [each.type for each in statements] != [duckdb.StatementType.SELECT]:
            raise UserError(_bad_question("is not one SELECT (or DESCRIBE, SHOW TABLES)"))
        cursor = database.execute(statements[0])
        columns = [column[0] for column in cursor.description or ()]
        rows = cursor.fetchmany(limit + 1)
    except duckdb.InterruptException as error:
        fix = "ask for less, for fewer days (--since), or wait longer (--timeout)"
        what = f"has no answer after {timeout_s:g} s"
        raise UserError(Problem("TimedOut", what, "the question", fix)) from error
    except duckdb.Error as error:
        raise UserError(_bad_question(str(error).rstrip())) from error
    finally:
        timer.cancel()
    return Answer(columns, rows[:limit], is_cut=len(rows) > limit)


def _find_files(store: Store, folder: Path, since: str) -> Mapping[str, list[str]]:
    files: dict[str, list[str]] = defaultdict(list)
    for place in _list_parts(store, since):
        path = folder / place.key
        if path.is_file():  # a part may have come after the download
            files[place.table].append(str(path.resolve()))
    return files


def _download(store: Store, since: str, folder: Path) -> Path:
    with ThreadPoolExecutor(_DOWNLOADS) as pool:
        for _ in pool.map(lambda place: _fetch(store, place, folder), _list_parts(store, since)):
            pass
    return folder


def _fetch(store: Store, place: PartPlace, folder: Path) -> None:
    try:
        data = store.get(place.key)
    except MissingError:  # all tables were deleted a moment ago
        return
    path = folder / place.key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _list_parts(store: Store, since: str) -> list[PartPlace]:
    places = (PartPlace.parse(info.key) for info in store.list(PREFIX))
    return [place for place in places if place is not None and place.day >= since]


def _no_tables(uri: str, since: str) -> Problem:
    return Problem(
        "NotFound",
        what=f"has no tables since {since}" if since else "has no tables",
        where=uri,
        fix="name the store of a feedback service (ETUDE_FEEDBACK_STORE) that has run for"
        " ETUDE_FEEDBACK_TABLES_S seconds",
    )


def _bad_question(what: str) -> Problem:
    fix = "ask in DuckDB's SQL; 'SHOW TABLES' and 'DESCRIBE events' show what there is"
    return Problem("InvalidQuery", what, "the question", fix)
