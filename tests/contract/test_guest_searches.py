"""Searches inside of a guest against those of the host's engine: the same lines, whatever asked."""

import tempfile
from collections.abc import Awaitable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.vm import guests

from etude.agent.patterns import GrepQuery, PatternError
from etude.agent.workspace import ExecResult, FolderWorkspace, WorkspaceError
from etude.envserver.guest.calls import GuestRequest
from etude.envserver.guest.workspace import GuestWorkspace
from etude.v1 import guest_pb2


async def refuse(command: str, timeout_s: float) -> ExecResult:
    raise AssertionError(f"no command should run: {command} {timeout_s}")


texts = st.text(alphabet="abAB\n\r\t k\u212aé\u017fsß.(", max_size=60).map(str.encode) | st.lists(
    st.sampled_from(
        [b"a", b"b", b"\n", b"\xff", b"\xed\xa0\x80", b"\xe9", "é".encode(), b"\0", b" "]
    ),
    max_size=30,
).map(b"".join)
names = st.lists(
    st.sampled_from(["a", "b.py", ".c", "d-e", "é", "z[1]"]), min_size=1, max_size=3
).map("/".join)
pieces = st.sampled_from(
    [
        *("a", "b", "k", "é", "ß", ".", "^", "$", "|", "*", "+", "?", "(", ")", "(?:", "(?i)"),
        *("[a-c]", "[^a]", "[^é]", r"\b", r"\B", r"\s", r"\w", r"\W", r"\d", r"\A", r"\z", r"\pL"),
        *(r"\C", r"\.", r"\x{e9}", "{2}", "{1,3}", "{,2}", "(?s).", r"\Q.\E", "[[:alpha:]]"),
        *("(?P<n>a)", r"\n", r"\Z", r"\1", r"\_", "(?=a)", "a{1001}", "[z-a]", "\n", " ", "(?U)"),
        *(r"\v", "[]a]", "[a-", "(?-m)"),
    ]
)
patterns = st.lists(pieces, max_size=5).map("".join)
globs = st.lists(
    st.sampled_from(
        ["*", "**", "?", "a", ".py", "/", "[ab]", "[!a]", "{a,b.py}", ".", "é", "[", "{"]
    ),
    max_size=4,
).map("".join)
queries = st.builds(
    GrepQuery,
    pattern=patterns,
    is_literal=st.booleans(),
    path=st.sampled_from(["", ".", "a", "a/b.py", ".c"]),
    globs=st.lists(globs, max_size=2).map(tuple),
    ignore_case=st.booleans(),
    multiline=st.booleans(),
    before=st.integers(0, 2),
    after=st.integers(0, 2),
    limit=st.integers(0, 6),
)


async def said(answer: Awaitable[object]) -> object:
    try:
        return await answer
    except (WorkspaceError, PatternError) as error:
        return type(error), str(error)


def put(root: Path, tree: dict[str, bytes]) -> None:
    for path, data in tree.items():
        try:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(data)
        except OSError:
            continue  # a path that is a file above another's


def test_a_search_in_the_guest_finds_what_the_host_finds(tmp_path: Path) -> None:
    with guests.running(("go",), tmp_path) as run:

        @settings(max_examples=600)
        @given(tree=st.dictionaries(names, texts, max_size=5), query=queries, pattern=globs)
        def check(tree: dict[str, bytes], query: GrepQuery, pattern: str) -> None:
            async def compare(made: dict[str, guests.Guest]) -> None:
                with tempfile.TemporaryDirectory() as root:
                    put(Path(root), tree)
                    folder = FolderWorkspace(Path(root), refuse)
                    guest = GuestWorkspace(made["go"].channel, refuse, cwd=root)
                    assert await said(folder.grep(query)) == await said(guest.grep(query))
                    assert await said(folder.glob(pattern)) == await said(guest.glob(pattern))

            run(compare)

        check()


@pytest.mark.parametrize(
    ("query", "is_native"),
    [
        (GrepQuery(pattern=r"def \w+\("), True),
        (GrepQuery(pattern="TODO|FIXME", ignore_case=True), True),
        (GrepQuery(pattern="a.*b", multiline=True), True),
        (GrepQuery(pattern="é+"), True),
        (GrepQuery(pattern="a*", multiline=True), False),
        (GrepQuery(pattern=r"\p{Greek}"), False),
        (GrepQuery(pattern="É", ignore_case=True), False),
    ],
)
async def test_the_guest_searches_itself_where_the_engines_surely_agree(
    tmp_path: Path, query: GrepQuery, *, is_native: bool
) -> None:
    async with guests.guest("go", tmp_path) as guest:
        grep = guest_pb2.GuestGrep(
            pattern=query.pattern, ignore_case=query.ignore_case, multiline=query.multiline
        )
        request = GuestRequest(operation=guest_pb2.GuestCall(grep=grep))
        status = (await guest.channel.call(request)).result.status
    expected = guest_pb2.GUEST_STATUS_OK if is_native else guest_pb2.GUEST_STATUS_UNSUPPORTED
    assert status == expected


async def test_lines_above_the_credit_of_a_stream_arrive_whole(tmp_path: Path) -> None:
    line = b"x" * 1_500_000
    async with guests.guest("go", tmp_path) as guest:
        (tmp_path / "a").write_bytes(line + b"\n" + line)
        workspace = GuestWorkspace(guest.channel, refuse)
        folder = FolderWorkspace(tmp_path, refuse)
        query = GrepQuery(pattern="x$")
        assert await workspace.grep(query) == await folder.grep(query)
