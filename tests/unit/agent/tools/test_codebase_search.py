"""The search tool: what it answers, where it looks, and what it makes of edits."""

from collections.abc import Callable

import pytest

from etude.agent.tool_calls import ParsedCall
from etude.agent.toolsets import run_calls, toolset
from etude.agent.workspace import Workspace

MakeWorkspace = Callable[[dict[str, bytes]], Workspace]

SHOP = {
    "shop/cart.py": b"""\
def add_item(cart, item):
    '''Put an article into the basket.'''
    cart.append(item)


def total_price(cart):
    return sum(item.price for item in cart)
""",
    "shop/sessions.py": b"""\
def remove_expired(sessions, now):
    for key in [k for k, s in sessions.items() if s.ends < now]:
        del sessions[key]
""",
    "docs/sessions.md": b"# Sessions\n\nExpired sessions are removed once a minute.\n",
    ".git/sessions.py": b"expired sessions removed\n",
    "picture.png": b"\x89PNG\0expired sessions",
}


async def search(workspace: Workspace, query: str, *folders: str) -> str:
    arguments = {"query": query, "target_directories": list(folders)}
    call = ParsedCall(name="codebase_search", arguments=arguments)
    (outcome,) = await run_calls(toolset("Standard"), workspace, [call])
    return outcome.content


def places(text: str) -> list[str]:
    return [part.partition("\n")[0] for part in text.split("\n\n")[:-1]]


async def test_results_are_numbered_lines_and_name_their_backend(
    make_workspace: MakeWorkspace,
) -> None:
    found = await search(make_workspace(SHOP), "Where are expired sessions removed?", "shop")
    assert found == (
        "shop/sessions.py:1-3\n"
        "1|def remove_expired(sessions, now):\n"
        "2|    for key in [k for k, s in sessions.items() if s.ends < now]:\n"
        "3|        del sessions[key]\n\n"
        "[hashed-1]"
    )


async def test_hidden_and_binary_files_are_not_searched(make_workspace: MakeWorkspace) -> None:
    found = await search(make_workspace(SHOP), "expired sessions")
    assert sorted(places(found)) == ["docs/sessions.md:1-3", "shop/sessions.py:1-3"]


async def test_a_file_may_be_searched_by_itself(make_workspace: MakeWorkspace) -> None:
    found = await search(make_workspace(SHOP), "expired sessions", "docs/sessions.md")
    assert places(found) == ["docs/sessions.md:1-3"]


@pytest.mark.parametrize(
    ("query", "folder", "answer"),
    [
        ("expired sessions", "none", "Error: none: no such file"),
        ("expired sessions", "..", "Error: ..: is outside of the workspace"),
        ("?! é", ".", "Error: the query has no word of two or more Latin letters"),
        ("zebra", ".", "No code found.\n\n[hashed-1]"),
        ("", ".", "Error: codebase_search: argument 'query'"),
        ("x" * 5_000, ".", "Error: codebase_search: argument 'query'"),
    ],
)
async def test_what_cannot_be_answered_says_why(
    make_workspace: MakeWorkspace, query: str, folder: str, answer: str
) -> None:
    assert (await search(make_workspace(SHOP), query, folder)).startswith(answer)


async def test_edits_are_seen_at_once(make_workspace: MakeWorkspace) -> None:
    workspace = make_workspace(SHOP)
    assert places(await search(workspace, "total price"))[0] == "shop/cart.py:1-7"
    await workspace.write("shop/cart.py", b"def nothing():\n    pass\n")
    await workspace.write("shop/money.py", b"def total_price(cart):\n    return 0\n")
    assert places(await search(workspace, "total price"))[0] == "shop/money.py:1-2"
    await workspace.delete("shop/money.py")
    assert "No code found." in await search(workspace, "total price")
    await workspace.write("shop/cart.py", SHOP["shop/cart.py"])
    assert places(await search(workspace, "total price"))[0] == "shop/cart.py:1-7"


async def test_calls_of_one_turn_search_at_the_same_time(make_workspace: MakeWorkspace) -> None:
    workspace = make_workspace(SHOP)
    queries = ["total price", "expired sessions", "put an article into the basket"]
    calls = [ParsedCall(name="codebase_search", arguments={"query": query}) for query in queries]
    together = await run_calls(toolset("Standard"), workspace, calls)
    assert [o.content for o in together] == [await search(workspace, query) for query in queries]


async def test_long_results_are_cut_in_the_middle(make_workspace: MakeWorkspace) -> None:
    lines = [f"    value_{n} = 'a rather long line of a function number {n}'" for n in range(75)]
    long = "def wide():\n" + "\n".join(lines) + "\n"
    found = await search(make_workspace({"a.py": long.encode()}), "wide function")
    assert "omitted; read a.py from line 1 ...]" in found
    assert len(found) < 3_400
