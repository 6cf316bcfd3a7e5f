"""Turns that look: reading, listing, finding, searching, and being wrong about it."""

from collections.abc import Iterator

from tests.harness.golden.calls import Turn, raw, step


def reads() -> Iterator[Turn]:
    """What a file's lines look like, up to every cap."""
    for path in ("README.md", "shop/core.py", "shop/windows.py", "shop/bom.py", "shop/münze.py"):
        yield (step("read_file", path=path),)
    for name in ("long.txt", "wide.txt", "latin1.txt", "mixed.txt", "no_end.txt", "empty.txt"):
        yield (step("read_file", path=f"data/{name}"),)
    yield (
        step("read_file", path="data/long.txt", offset=4990, limit=5),
        step("read_file", path="data/long.txt", offset=4999),
        step("read_file", path="data/long.txt", offset=1, limit=1),
        step("read_file", path="data/long.txt", offset=5001),
        step("read_file", path="data/empty.txt", offset=2),
    )
    wrong = ("data/binary.bin", "none.txt", "shop", "../etc/passwd", "/etc/passwd", "README.md/x")
    yield tuple(step("read_file", path=path) for path in wrong)
    for path in ("/workspace/README.md", "./shop//../README.md", "", "a\0b", "x" * 300):
        yield (step("read_file", path=path, limit=1),)
    ten = ["README.md", "shop/core.py", "none.txt", *(f"many/f{n:03}.txt" for n in range(7))]
    yield tuple(step("read_file", path=path) for path in ten)


def lists() -> Iterator[Turn]:
    """Folders and globs."""
    yield (
        step("list_dir"),
        step("list_dir", path="shop"),
        step("list_dir", path="many", ignore_globs=["f0*", "f1??.txt"]),
        step("list_dir", path=".hidden"),
        step("list_dir", path="none"),
        step("list_dir", path="README.md"),
    )
    for pattern in (
        "**/*.py",
        "*",
        "many/f01[2-5].txt",
        "{shop,tests}/*.py",
        ".*",
        "**/e.txt",
        "x",
    ):
        yield (step("glob", pattern=pattern),)


def searches() -> Iterator[Turn]:
    """Regular expressions over everything, and questions."""
    for pattern in ("needle", "^def ", "price[s]? -", "caf", "€", "(?i)SHOP", "nowhere at all"):
        yield (step("grep", pattern=pattern),)
    for mode in ("files_with_matches", "count"):
        yield (step("grep", pattern="needle [0-3]$", output_mode=mode),)
        yield (step("grep", pattern="result", output_mode=mode, path="shop"),)
    yield (
        step("grep", pattern="TOTAL", type="py", more={"-i": True}),
        step("grep", pattern="result = ", path="shop/core.py", more={"-A": 1, "-B": 2}),
        step("grep", pattern="result", path="shop", glob="*.py", more={"-C": 1}),
        step("grep", pattern="for .*:\\n.*price", path="shop/core.py", multiline=True),
        step("grep", pattern="needle", path=".hidden"),
        step("grep", pattern="needle", glob=".*"),
        step("grep", pattern="needle", path="many", glob="f00?.txt"),
    )
    for pattern in ("(", "(?=x)", "\\1", "a{5000}"):
        yield (step("grep", pattern=pattern),)
    yield (step("grep", pattern="x", path="none"), step("grep", pattern="x", type="cobol"))
    yield (
        step("codebase_search", query="How is the sum of the prices computed?"),
        step(
            "codebase_search", query="Where is a discount taken off?", target_directories=["shop"]
        ),
        step("codebase_search", query="??"),
    )


def mistakes() -> Iterator[Turn]:
    """Calls that cannot run."""
    yield (raw("read_file", "{"), raw("read_file", "[]"), raw("read_file", '{"path": NaN}'))
    yield (raw("read_file", '{"path": "\\ud800"}'), raw("read_file", '{"path": 1}'))
    yield (
        step("fly", path="x"),
        step("read_file"),
        step("read_file", path="README.md", colour="red"),
        step("read_file", path="README.md", offset=0),
        step("grep", pattern=""),
        step("terminal_io", job=1, op="read", input="x"),
        step("todo_write", todos="milk"),
    )
    yield (step("write_file", path="large.txt", content="x" * (600 << 10)),)
