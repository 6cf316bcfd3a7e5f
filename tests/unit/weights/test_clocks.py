"""Nobody on the way of the weights asks what time it is: each would live by its own clock."""

import ast
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import etude.common
import etude.common.blobs
import etude.common.weights
import etude.inference
import etude.trainer

WALL_CLOCK = frozenset(
    (
        *("time", "time_ns", "localtime", "gmtime", "ctime", "strftime", "clock_gettime"),
        *("now", "utcnow", "today"),
    )
)
"""Of the modules time and datetime; what only ever grows, and pauses, may be used."""
FILE_TIMES = frozenset(("st_mtime", "st_mtime_ns", "st_ctime", "st_atime", "getmtime"))
FOLDERS_OWN = {"compactor.py": ["path.lstat().st_mtime"]}
"""The one look at when a file was written: by the clock of a folder that is a store."""
AGES = frozenset(("protocol/listing.py", "protocol/retention.py"))
"""May look at when an object was written: by the store's clock, compared with another of its
objects. So an upload that nothing names is swept."""


def folder(package: ModuleType) -> Path:
    return Path(next(iter(package.__path__)))


def modules() -> Iterator[Path]:
    """Protocol, coding and store; who publishes and keeps; who stages and commits."""
    yield from folder(etude.common.weights).rglob("*.py")
    yield from folder(etude.common.blobs).rglob("*.py")
    yield from folder(etude.inference).rglob("*.py")
    trainer = folder(etude.trainer)
    for name in ("export", "compactor", "controller/publishing", "controller/checkpoints"):
        yield from (trainer / name).rglob("*.py")
    yield trainer / "model" / "checkpoint_layout.py"
    yield folder(etude.common) / "store_retry.py"


def asked(text: str) -> list[str]:
    """Every look at a wall clock in a module."""
    tree = ast.parse(text)
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    found = [ast.unparse(a) for a in attributes if a.attr in FILE_TIMES]
    for attribute in attributes:
        owner = ast.unparse(attribute.value).split(".")[-1]
        if owner in {"time", "datetime", "date"} and attribute.attr in WALL_CLOCK:
            found.append(ast.unparse(attribute))
    for node in imports:
        names = {alias.name for alias in node.names}
        if node.module == "time" and names & WALL_CLOCK:
            found.append(ast.unparse(node))
    return found


def test_no_module_on_the_way_of_the_weights_reads_a_wall_clock() -> None:
    seen = list(modules())
    assert len(seen) > 100
    assert {path.name: found for path in seen if (found := asked(path.read_text()))} == FOLDERS_OWN


def test_ages_are_looked_at_by_the_collector_alone_and_come_from_the_store() -> None:
    root = folder(etude.common.weights)
    users = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if any(
            isinstance(node, ast.Attribute) and node.attr == "modified_s"
            for node in ast.walk(ast.parse(path.read_text()))
        )
    }
    assert users == AGES


@pytest.mark.parametrize(
    "text",
    [
        "import time\ntime.time()",
        "from time import time_ns",
        "import datetime\ndatetime.datetime.now()",
        "from datetime import date\ndate.today()",
        "x.stat().st_mtime",
    ],
)
def test_a_look_at_a_wall_clock_is_found(text: str) -> None:
    assert len(asked(text)) == 1
