"""Turns that change files: replacing, writing, patching, and what linters and lists say to it."""

from collections.abc import Iterator

from tests.harness.golden.calls import Turn, step

_PATCH = """--- a/shop/core.py
+++ b/shop/core.py
@@ -10,7 +10,7 @@


 def discount(price, percent):
-    return price - price * percent / 100
+    return price * (100 - percent) / 100


 def mean(prices):
"""
_TWO_FILES = """diff --git a/shop/rounding.py b/shop/rounding.py
new file mode 100644
--- /dev/null
+++ b/shop/rounding.py
@@ -0,0 +1,2 @@
+def rounded(price):
+    return round(price, undefined_digits)
--- a/data/mixed.txt
+++ /dev/null
@@ -1,3 +0,0 @@
-one\r
-two
-three\r
"""


def replacements() -> Iterator[Turn]:
    """One place, every place, no place."""
    core = "shop/core.py"
    yield (
        step("search_replace", path=core, old_string="result - price", new_string="result + price"),
        step("read_file", path=core, offset=4, limit=5),
        step("search_replace", path=core, old_string="result", new_string="sum"),
        step("search_replace", path=core, old_string="resutl = 0", new_string="x"),
        step("search_replace", path=core, old_string="same", new_string="same"),
        step("search_replace", path="none.py", old_string="a", new_string="b"),
    )
    windows = "shop/windows.py"
    yield (
        step("search_replace", path=windows, old_string="result = 0\n    for", new_string="for"),
        step(
            "search_replace", path=windows, old_string="price", new_string="cost", replace_all=True
        ),
        step("read_file", path=windows),
    )
    yield (
        step("search_replace", path="shop/bom.py", old_string="VALUE = 1", new_string="VALUE = 2"),
        step("search_replace", path="shop/münze.py", old_string="€", new_string="¥"),
        step("search_replace", path="data/latin1.txt", old_string="and", new_string="und"),
        step("search_replace", path="data/no_end.txt", old_string="an end", new_string="end"),
        step("grep", pattern="VALUE|MÜNZE|und|without end"),
    )
    yield (step("search_replace", path="data/rows.csv", old_string=",needle", new_string=""),)
    yield (step("search_replace", path="many", old_string="a", new_string="b"),)


def writes() -> Iterator[Turn]:
    """New files, replaced ones, deleted ones; in one turn, in order."""
    yield (
        step("write_file", path="notes/first.txt", content="one\ntwo\n"),
        step("write_file", path="notes/first.txt", content="three"),
        step("read_file", path="notes/first.txt"),
        step("delete_file", path="notes/first.txt"),
        step("read_file", path="notes/first.txt"),
        step("list_dir", path="notes"),
    )
    for path, content in (
        ("notes/ünïcode ☃.txt", "\u2028 and \u0000 and 😀\n"),
        ("notes", "a folder"),
        ("README.md/x", "below a file"),
        ("../outside.txt", "outside"),
        ("notes/crlf.txt", "one\r\ntwo\r\n"),
    ):
        yield (step("write_file", path=path, content=content),)
    yield (step("read_file", path="notes/crlf.txt"), step("glob", pattern="notes/*"))
    for path in ("none.txt", "shop", "data/empty.txt"):
        yield (step("delete_file", path=path),)


def patches() -> Iterator[Turn]:
    """All hunks or none."""
    yield (step("apply_patch", patch=_PATCH),)
    yield (step("apply_patch", patch=_PATCH),)  # it is applied already
    yield (step("apply_patch", patch=_PATCH.replace("core", "windows").replace("price", "cost")),)
    yield (step("apply_patch", patch=_TWO_FILES),)
    yield (step("read_file", path="data/mixed.txt"), step("read_file", path="shop/windows.py"))
    yield (step("apply_patch", patch=_TWO_FILES + _PATCH),)
    for wrong in ("please", _PATCH.replace("-10,7", "-10,9"), _PATCH.replace("shop", "../shop")):
        yield (step("apply_patch", patch=wrong),)


def lints() -> Iterator[Turn]:
    """Only what edits brought in is told."""
    cli = "shop/cli.py"
    yield (step("read_lints", paths=[cli, "shop/core.py"]),)
    new = "print(undefined_after)"
    yield (step("search_replace", path=cli, old_string="print(undefined_before)", new_string=new),)
    yield (step("read_lints", paths=[cli, "shop/rounding.py", "README.md", "none.py"]),)
    yield (step("read_lints", paths=[cli, "shop/rounding.py", "README.md"]),)
    yield (step("write_file", path="shop/broken.py", content="def f(:\n"),)
    yield (step("write_file", path="shop/broken.py", content="def f():\n    pass\n"),)


def todos() -> Iterator[Turn]:
    """A list beside the files."""
    plan = [
        {"id": "1", "content": "find the bug", "status": "completed"},
        {"id": "2", "content": "fix\nit", "status": "in_progress"},
        {"id": "ß", "content": "test it"},
    ]
    yield (step("todo_write", todos=plan),)
    yield (
        step("todo_write", merge=True, todos=[{"id": "2", "status": "completed"}]),
        step("todo_write", merge=True, todos=[{"id": "4", "content": "celebrate"}]),
        step("todo_write", merge=True, todos=[{"id": "5"}]),
        step("todo_write", todos=[*plan, plan[0]]),
        step("todo_write", todos=[]),
    )
