"""Where files are cut: along their definitions, within bounds, whatever the bytes."""

import itertools
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.agent.search import chunks
from etude.agent.search.chunks import chunk_files, is_searched
from etude.agent.search.parsing import worker
from etude.agent.search.parsing.grammars import GRAMMARS, grammar_of
from etude.agent.search.parsing.line_ranges import MAX_LINES, LineRange, windows
from etude.common.errors import UnavailableError


def spans_of(files: dict[str, bytes]) -> list[tuple[str, int, int]]:
    return [(c.path, c.start, c.end) for c, _ in chunk_files(files)]


def body(num_lines: int, indent: str = "    ") -> str:
    return "".join(f"{indent}x = {n}\n" for n in range(num_lines))


def test_functions_and_classes_are_whole() -> None:
    text = f"import os\n\n\ndef one():\n{body(20)}\n\nclass Two:\n    y = 1\n{body(30)}\n"
    assert spans_of({"a.py": text.encode()}) == [("a.py", 1, 1), ("a.py", 4, 24), ("a.py", 27, 58)]


def test_short_neighbours_stand_together_and_comments_with_what_follows() -> None:
    text = f"def a():\n    pass\n\ndef b():\n    pass\n\n# About c.\n@wraps\ndef c():\n{body(20)}"
    assert spans_of({"a.py": text.encode()}) == [("a.py", 1, 5), ("a.py", 7, 29)]


def test_a_long_class_is_cut_between_its_methods() -> None:
    methods = "".join(f"    def method_{n}(self):\n{body(30, '        ')}\n" for n in range(4))
    found = spans_of({"a.py": f"class Long:\n    '''About it.'''\n\n{methods}".encode()})
    assert found[0] == ("a.py", 1, 2)
    assert [(start, end) for _, start, end in found[1:]] == [
        (4, 34),
        (36, 66),
        (68, 98),
        (100, 130),
    ]


def test_a_long_function_is_cut_and_no_line_is_lost() -> None:
    found = spans_of({"a.py": f"def long():\n{body(300)}".encode()})
    assert found[0][1] == 1
    assert found[-1][2] == 301
    assert all(end - start < MAX_LINES for _, start, end in found)


def test_files_without_a_grammar_are_cut_into_windows() -> None:
    found = spans_of({"notes.md": "".join(f"line {n}\n" for n in range(130)).encode()})
    assert found == [("notes.md", 1, 60), ("notes.md", 41, 100), ("notes.md", 81, 130)]


SAMPLES = {
    "a.c": "int add(int a, int b)\n{\n" + "  a += b;\n" * 20 + "}\n",
    "a.cpp": "namespace n {\nclass A {\n" + "  void f() { g(); }\n" * 20 + "};\n}\n",
    "a.go": "func Add(a, b int) int {\n" + "\ta += b\n" * 20 + "\treturn a\n}\n",
    "a.java": "class A {\n  int add(int a) {\n" + "    a += 1;\n" * 20 + "  }\n}\n",
    "a.js": "function add(a) {\n" + "  a += 1;\n" * 20 + "}\n",
    "a.py": f"def add(a):\n{body(20)}",
    "a.rs": "/// Adds.\n#[inline]\nfn add(a: i32) -> i32 {\n" + "    a += 1;\n" * 20 + "}\n",
    "a.ts": "function add(a: number): void {\n" + "  a += 1;\n" * 20 + "}\n",
    "a.tsx": "const A = () => (\n" + "  <b>x</b>\n" * 20 + ");\n",
}


def test_every_language_has_a_sample() -> None:
    assert {grammar_of(path) for path in SAMPLES} == set(GRAMMARS)


@pytest.mark.parametrize("path", SAMPLES)
def test_two_definitions_of_a_language_are_two_chunks(path: str) -> None:
    text = SAMPLES[path]
    found = spans_of({path: (text + "\n" + text).encode()})
    length = text.count("\n")
    assert (path, length + 2, 2 * length + 1) in found


HOSTILE = [
    b"",
    b"\n\n\n",
    b"(" * 40_000,
    b"[" * 60_000 + b"]" * 60_000,
    b"if x:\n" * 20_000,
    b"f'{" * 40_000,
    b'"""' * 40_000,
    bytes(range(256)) * 500,
    b"\xff\xfe" * 40_000,
    b"def f(\xc3:\r\n\r" * 10_000,
    b"\n" * 300_000 + b"x",
    b"{\n" * 40_000,
    b"<a>\n" * 60_000,
]


@pytest.mark.parametrize("path", ["a.py", "a.tsx", "a.cpp", "a.rs", "a.txt"])
def test_hostile_files_are_cut_within_bounds(path: str) -> None:
    names = {f"{number}/{path}": data for number, data in enumerate(HOSTILE)}
    found = spans_of(names)
    for name, data in names.items():
        held = [span for span in found if span[0] == name]
        check(held, data.split(b"\n"))
        assert bool(held) == bool(data.strip()), name


def check(found: Sequence[tuple[str, int, int]], lines: Sequence[bytes]) -> None:
    """The laws of chunks: in order, in bounds, no line lost."""
    covered = {n for _, start, end in found for n in range(start, end + 1)}
    assert all(
        1 <= start <= end <= len(lines) and end - start < MAX_LINES for _, start, end in found
    )
    assert [(start, end) for _, start, end in found] == sorted((s, e) for _, s, e in found)
    assert all(n in covered for n, line in enumerate(lines, 1) if line.strip())


@settings(max_examples=60)
@given(
    st.lists(
        st.sampled_from(
            [
                "def f():",
                "class A:",
                "    def g(self):",
                "    x = (",
                ")",
                "",
                "# c",
                "@d",
                "'''",
                "}",
            ]
        ),
        max_size=250,
    ),
    st.sampled_from(sorted(GRAMMARS)),
)
def test_no_line_of_any_file_is_lost(lines: list[str], grammar: str) -> None:
    data = "\n".join(lines).encode()
    found = worker.cut_file(grammar, data) if data else []
    assert found is not None
    cut_lines = [line.encode() for line in lines]
    shown = [(grammar, s.start + 1, s.end) for s in found if s.end > s.start]
    check(shown, cut_lines or [b""])


def test_a_file_that_is_too_much_for_the_parser_is_cut_into_windows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker, "STEPS", -200)
    assert worker.cut_file("python", f"def f():\n{body(800)}".encode()) is None
    monkeypatch.undo()
    assert worker.cut_file("python", b"def f():\n    pass\n") == [LineRange(0, 2)]


def test_a_file_that_ends_its_worker_costs_only_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    dying = tmp_path / "dying.py"
    dying.write_text(
        "import os, sys\n"
        "from etude.agent.search.parsing import worker\n"
        "real = worker.cut_file\n"
        "worker.cut_file = lambda n, d: os.abort() if b'poison' in d else real(n, d)\n"
        "worker.main(sys.stdin.buffer, sys.stdout.buffer)\n"
    )
    monkeypatch.setattr(chunks, "_COMMAND", ("-I", str(dying)))
    long = "".join(f"# poison {n}\n" for n in range(100)).encode()
    files = {"a.py": SAMPLES["a.py"].encode(), "b.py": long, "c.py": SAMPLES["a.py"].encode()}
    assert spans_of(files) == [
        ("a.py", 1, 21),
        *(("b.py", 1, 60), ("b.py", 41, 100)),
        ("c.py", 1, 21),
    ]


@pytest.mark.parametrize(
    "answer",
    [b"-", b"0:1000000", b"0:5 2:3", b"5:1", b"0:-1", b"1:21", b"x", b"0:1", b"0:21:3", b""],
)
def test_an_answer_that_cannot_be_is_not_believed(
    answer: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lying = tmp_path / "lying.py"
    lying.write_text(f"print('ready'); print({answer.decode()!r})\n")
    monkeypatch.setattr(chunks, "_COMMAND", ("-I", str(lying)))
    assert spans_of({"a.py": SAMPLES["a.py"].encode()}) == [("a.py", 1, 21)]


@pytest.mark.parametrize("program", ["import no_such_parser\n", "raise OSError('no jail')\n", ""])
def test_a_machine_without_a_parser_says_so(
    program: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bare = tmp_path / "bare.py"
    bare.write_text(program)
    monkeypatch.setattr(chunks, "_COMMAND", ("-I", str(bare)))
    with pytest.raises(UnavailableError, match=r"pip install 'etude\[envserver\]'"):
        spans_of({"a.py": b"x = 1\n"})


@pytest.mark.parametrize(
    ("path", "data", "expected"),
    [
        ("a.py", b"x = 1\n", True),
        ("a.py", b"", False),
        (".a.py", b"x = 1\n", False),
        ("a/.b/c.py", b"x = 1\n", False),
        ("a.py", b"x\0", False),
        ("a.py", b"x = 1\n" * 100_000, False),
        ("a.txt", b"some text\n" * 20_000, False),
        ("a.js", b"x" * 500, False),
        ("a.js", b"{\n" * 5_000, False),
        ("Makefile", b"all:\n", True),
    ],
)
def test_what_people_write_is_searched(path: str, data: bytes, *, expected: bool) -> None:
    assert is_searched(path, data) is expected


@given(st.integers(0, 500), st.integers(0, 500))
def test_windows_cover_their_span(start: int, length: int) -> None:
    found = windows(LineRange(start, start + length))
    assert found[0].start == start
    assert found[-1].end == start + length
    assert all(one.end >= other.start for one, other in itertools.pairwise(found))


def test_the_worker_opens_nothing_and_keeps_its_limits(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    code = (
        "import resource, sys; from etude.agent.search.parsing import worker; worker.confine()\n"
        "limits = [resource.getrlimit(x)[1] for x in (resource.RLIMIT_AS, resource.RLIMIT_CPU)]\n"
        "try: sys.stdout.write(open(sys.argv[1]).read())\n"
        "except PermissionError:\n"
        "    print('denied', *limits, len(worker.cut_file('rust', b'fn a() {}')))\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, str(secret)], capture_output=True, text=True, check=False
    )
    assert done.stdout == f"denied {worker.MEMORY_BYTES} {worker.CPU_S} 1\n", done.stderr
