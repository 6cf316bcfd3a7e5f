"""What has to stay hidden: lines that tell, and lines that files share by chance."""

from hypothesis import given
from hypothesis import strategies as st

from etude.envserver.tasks import hidden_content

PATCH = b"""\
diff --git a/src/code.py b/src/code.py
--- a/src/code.py
+++ b/src/code.py
@@ -1,2 +1,3 @@
 def total(values):
-    return sum(values)
+    kept = [value for value in values if value is not None]
+    return sum(kept, start=0.0)
diff --git a/setup.py b/setup.py
--- a/setup.py
+++ b/setup.py
@@ -1 +1 @@
-x = 1
+x = 2
"""


def test_added_lines_of_a_patch_tell_for_each_file_that_they_are_in() -> None:
    found = hidden_content.hidden_units(
        {"src/code.py": b"def total(values):\n"}, {}, {"gold.patch": PATCH}
    )
    assert [(unit.rule, unit.name) for unit in found] == [
        ("gold-lines", "solution/gold.patch (src/code.py)")
    ]
    assert found[0].lines == (
        "kept = [value for value in values if value is not None]",
        "return sum(kept, start=0.0)",
    )
    assert found[0].needed == 2


def test_lines_that_the_workspace_s_own_file_has_tell_nothing() -> None:
    workspace = {"pkg/code.py": b"def total(values):\n    return sum(values)\n"}
    solution = {"files/pkg/code.py": b"def total(values):\n    return sum(values or [], start=0)\n"}
    (unit,) = hidden_content.hidden_units(workspace, {}, solution)
    assert unit.lines == ("return sum(values or [], start=0)",)


def test_a_short_line_alone_tells_nothing() -> None:
    assert hidden_content.hidden_units({"a.py": b"x = 1\n"}, {}, {"a.py": b"return a + b\n"}) == []


def test_a_script_s_own_targets_are_spared() -> None:
    workspace = {"a/code.py": b"first line of the file\nsecond line of the file\n"}
    script = b"cat > a/code.py <<EOF\nfirst line of the file\nsecond line of the file\nnew\nEOF\n"
    (unit,) = hidden_content.hidden_units(workspace, {}, {"solve.sh": script})
    assert len(unit.exempt) == 1


def test_small_files_are_alike_by_chance() -> None:
    assert hidden_content.hidden_hashes({"__init__.py": b"", "a": b"x\n"}, {}) == {}
    assert (
        len(
            hidden_content.hidden_hashes(
                {"a": b"x" * hidden_content.MIN_FILE_BYTES}, {"b": b"y" * 99}
            )
        )
        == 2
    )


_FILES = st.dictionaries(st.text(min_size=1, max_size=8), st.binary(max_size=200), max_size=4)


@given(_FILES, _FILES, _FILES)
def test_any_files_have_units_that_can_be_reached(
    workspace: dict[str, bytes], tests: dict[str, bytes], solution: dict[str, bytes]
) -> None:
    for unit in hidden_content.hidden_units(workspace, tests, solution):
        assert 1 <= unit.needed <= len(unit.lines)
