"""A changed workspace is searched as if it had been indexed anew, but for the weights of words."""

import asyncio
import random
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.agent.search import codebase
from etude.agent.search.chunks import Chunk
from etude.agent.search.codebase import Codebase, SearchedFiles
from etude.agent.search.contents import FileContent, content_digest
from etude.agent.search.embedders.hashed import HashedEmbedder
from etude.agent.search.index import BaseIndex, build_base_index, build_index, index_chunks
from etude.agent.search.overlay import Overlay
from etude.agent.search.shared_index import SharedIndex

NAMES = ["a.txt", "b.txt", "deep/c.txt", "deep/d.txt", "z.txt"]
TEXTS = ["open the file", "close the file\nand the door", "door", "parse header\n" * 90, "the the"]
Tree = dict[str, bytes]
trees = st.dictionaries(
    st.sampled_from(NAMES), st.sampled_from(TEXTS).map(str.encode), max_size=len(NAMES)
)
FIRST: Tree = {"a.txt": b"open the file", "b.txt": b"door", "deep/c.txt": b"parse header\n" * 90}
QUESTIONS = ["open the door", "parse header", "file", "the"]


def changed(overlay: Overlay, tree: Mapping[str, bytes]) -> None:
    digests = {path: content_digest(data) for path, data in tree.items()}
    fresh = {
        path: None
        if overlay.num_bytes(path, digests[path]) is not None
        else FileContent(digests[path], tree[path])
        for path in overlay.changed(digests)
    }
    overlay.update(digests, fresh)


def rebuilt(first: BaseIndex, tree: Mapping[str, bytes]) -> Overlay:
    """An index of all present files, with the weights of words that the first had."""
    index = build_index(index_chunks(tree, first.embedder), first.embedder.num_components)
    digests = {path: content_digest(data) for path, data in tree.items()}
    present = BaseIndex(embedder=first.embedder, index=index, digests=digests)
    return Overlay(present, first.index.postings)


@settings(max_examples=60)
@given(
    first=trees,
    steps=st.lists(trees, min_size=1, max_size=4),
    folders=st.sampled_from([(), ("deep",), ("a.txt", "deep")]),
)
def test_an_overlay_is_an_index_of_the_present_files_up_to_the_weights_of_words(
    first: Tree, steps: list[Tree], folders: tuple[str, ...]
) -> None:
    began = build_base_index(first, HashedEmbedder())
    overlay = Overlay(began)
    for tree in steps:
        changed(overlay, tree)
        anew = rebuilt(began, tree)
        for question in QUESTIONS:
            found = overlay.search(question, folders, 10)
            assert found == anew.search(question, folders, 10)
            assert all(not folders or chunk.path.startswith(folders) for chunk in found)


def test_an_unchanged_workspace_answers_as_its_base_whatever_came_between() -> None:
    overlay = Overlay(build_base_index(FIRST, HashedEmbedder()))
    before = [overlay.search(question, (), 10) for question in QUESTIONS]
    changed(overlay, {"new.txt": b"open the door", "b.txt": b"gone"})
    assert [overlay.search(question, (), 10) for question in QUESTIONS] != before
    changed(overlay, FIRST)
    assert [overlay.search(question, (), 10) for question in QUESTIONS] == before


def test_the_order_in_which_files_are_given_changes_nothing() -> None:
    chance = random.Random(1)
    texts = {f"{n % 7}/{n}.txt": f"open door {n % 3}\n".encode() for n in range(60)}
    paths = list(texts)
    found = []
    for _ in range(3):
        chance.shuffle(paths)
        overlay = Overlay(build_base_index({path: texts[path] for path in paths}, HashedEmbedder()))
        found.append([overlay.search(question, (), 60) for question in QUESTIONS])
    assert found[0] == found[1] == found[2]


def test_equal_scores_are_ordered_by_path() -> None:
    files = {f"{letter}/x.txt": b"open door" for letter in "dbca"}
    overlay = Overlay(build_base_index(files, HashedEmbedder()))
    changed(overlay, {**files, "bb/x.txt": b"open door"})
    found = [chunk.path for chunk in overlay.search("door", ("a", "b", "c", "d"), 10)]
    assert found == ["a/x.txt", "b/x.txt", "c/x.txt", "d/x.txt"]


class Workspace:
    """Files that count how often they are read."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.reads: list[str] = []

    async def read(self, path: str) -> bytes | None:
        self.reads.append(path)
        return self.tree.get(path)

    def files(self) -> SearchedFiles:
        return SearchedFiles(
            {path: content_digest(data) for path, data in self.tree.items()}, self.read
        )


async def test_only_what_is_new_is_read() -> None:
    workspace = Workspace(dict(FIRST))
    made = Codebase(SharedIndex(FIRST))
    await made.search(workspace.files(), "open", (), 10)
    assert workspace.reads == []
    workspace.tree["a.txt"] = b"something new"
    for _ in range(2):
        await made.search(workspace.files(), "something", (), 10)
    assert workspace.reads == ["a.txt"]


async def test_a_workspace_without_a_template_is_its_own() -> None:
    workspace = Workspace(dict(FIRST))
    made = Codebase()
    found = await made.search(workspace.files(), "open", (), 10)
    assert found.chunks == [Chunk("a.txt", 1, 1)]
    assert sorted(workspace.reads) == sorted(FIRST)
    workspace.tree["n.txt"] = b"open"
    assert (await made.search(workspace.files(), "open", (), 1)).chunks == [Chunk("n.txt", 1, 1)]
    assert len(workspace.reads) == len(FIRST) + 1


async def test_a_file_that_changes_while_it_is_read_is_read_again() -> None:
    workspace = Workspace(dict(FIRST))
    made = Codebase(SharedIndex(FIRST))
    stale = SearchedFiles({**workspace.files().digests, "a.txt": b"another digest"}, workspace.read)
    workspace.tree["a.txt"] = b"first version"
    await made.search(stale, "version", (), 10)
    workspace.tree["a.txt"] = b"second version"
    found = await made.search(workspace.files(), "second", (), 10)
    assert found.chunks == [Chunk("a.txt", 1, 1)]


async def test_more_changes_than_are_searched_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(codebase, "MAX_CHANGED_FILES", 3)
    files = {f"{n:03}.txt": b"door" for n in range(100)}
    workspace = Workspace({**files, **{f"{n:03}.txt": b"window" for n in range(5)}})
    made = Codebase(SharedIndex(files))
    found = await made.search(workspace.files(), "window", (), 10)
    assert [chunk.path for chunk in found.chunks] == ["000.txt", "001.txt", "002.txt"]
    assert found.num_skipped == 2


async def test_the_bytes_of_changes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codebase, "MAX_CHANGED_BYTES", 10)
    workspace = Workspace({**FIRST, "m.txt": b"window here", "n.txt": b"window there"})
    found = await Codebase(SharedIndex(FIRST)).search(workspace.files(), "window", (), 10)
    assert [chunk.path for chunk in found.chunks] == ["m.txt"]
    assert found.num_skipped == 1


async def test_one_index_is_built_for_all_who_ask_at_the_same_time() -> None:
    shared = SharedIndex(FIRST)
    found = await asyncio.gather(*(shared.get() for _ in range(5)))
    assert all(each is found[0] for each in found)


async def test_who_gives_up_waiting_does_not_end_the_building() -> None:
    shared = SharedIndex(FIRST)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await shared.get()
    assert len((await shared.get()).index.chunks) == 4
