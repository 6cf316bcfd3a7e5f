"""Patches that wait: accepted as a whole, or refused by the names of the files that moved."""

import json
from pathlib import Path

import pytest

from etude.agent.interactive.consent import AgentState, StoredConsent
from etude.agent.interactive.folder_changes import FileChange
from etude.agent.interactive.stored_patches import PatchStore, StoredPatch
from etude.agent.interactive.user_files import UserFile
from etude.common.errors import UserError
from etude.common.feedback.client import EventContext

DECISION = StoredConsent(
    service="http://127.0.0.1:1", tenant="t", user="u", terms="v", granted=True, decided="now"
)
OLD, NEW = UserFile(b"old\n"), UserFile(b"new\nlines\n", is_executable=True)


@pytest.fixture
def store(tmp_path: Path) -> PatchStore:
    home = AgentState(tmp_path / "state")
    home.store_consent(DECISION)
    return PatchStore(home)


@pytest.fixture
def patch(tmp_path: Path, store: PatchStore) -> StoredPatch:
    """Changes one file, makes one and deletes one."""
    folder = tmp_path / "user"
    folder.mkdir()
    for name in ("changed", "deleted"):
        (folder / name).write_bytes(OLD.content)
    patch = StoredPatch(
        instruction="Do it.",
        folder=str(folder),
        about=EventContext("subject", "abcdef0123", "1.3"),
        turn=4,
        files=(
            FileChange("changed", OLD, NEW),
            FileChange("sub/made", None, OLD),
            FileChange("deleted", OLD, None),
        ),
    )
    store.add(patch, b"the patch")
    return patch


def events(store: PatchStore) -> list[tuple[str, str]]:
    """Id and kind of each event that waits."""
    lines = store.home.spool.read_batch(max_events=99, max_bytes=1 << 20).lines
    read = [json.loads(line) for line in lines]
    return [(each["id"], each["type"].split(".")[-2]) for each in read]


async def test_an_accepted_patch_changes_the_folder_and_its_edits_are_looked_at_again(
    store: PatchStore, patch: StoredPatch
) -> None:
    assert store.find("abcd") == patch
    await store.accept(store.find("abcd"), store.home.open_client("key"))
    folder = Path(patch.folder)
    assert (folder / "changed").read_bytes() == NEW.content
    assert (folder / "changed").stat().st_mode & 0o111 == 0o111
    assert (folder / "sub/made").read_bytes() == OLD.content
    assert not (folder / "deleted").exists()
    kinds = [kind for _, kind in events(store)]
    assert kinds == ["accepted", "edit_applied", "edit_applied", "task_closed"]
    assert len(store.home.journal.list_files()) == 2
    assert store.list_patches() == []
    assert [*store.folder.iterdir()] == []


async def test_a_file_that_moved_refuses_the_whole_patch_by_name(
    store: PatchStore, patch: StoredPatch
) -> None:
    folder = Path(patch.folder)
    (folder / "deleted").write_text("the user goes on with it\n")
    (folder / "sub").mkdir()
    (folder / "sub/made").symlink_to("/etc/passwd")
    with pytest.raises(UserError, match="deleted, sub/made") as refused:
        await store.accept(patch, None)
    assert refused.value.problem.reason == "Conflict"
    assert (folder / "changed").read_bytes() == OLD.content
    assert store.list_patches() == [patch]
    assert store.text_file(patch).read_bytes() == b"the patch"


async def test_an_acceptance_that_was_killed_ends_when_it_is_repeated_with_the_same_events(
    store: PatchStore, patch: StoredPatch
) -> None:
    client = store.home.open_client("key")
    await store.accept(patch, client)
    told = events(store)
    # As if the process had died before it forgot the patch.
    store.add(patch, b"the patch")
    await store.accept(store.find("ab"), client)
    assert events(store) == told * 2
    (Path(patch.folder) / "sub/made").unlink()
    store.add(patch, b"the patch")
    await store.accept(store.find("ab"), None)
    assert (Path(patch.folder) / "sub/made").exists()


def test_a_rejected_patch_is_forgotten_and_told_of(store: PatchStore, patch: StoredPatch) -> None:
    store.reject(patch, store.home.open_client("key"))
    assert [kind for _, kind in events(store)] == ["rejected", "task_closed"]
    assert (Path(patch.folder) / "changed").read_bytes() == OLD.content
    assert store.list_patches() == []


def test_an_unknown_name_and_a_damaged_file_are_refused(
    store: PatchStore, patch: StoredPatch
) -> None:
    for name in ("b", ""):
        with pytest.raises(UserError, match="no patch waits"):
            store.find(name)
    (store.folder / f"{patch.name}.json").write_text('{"files": 3}')
    with pytest.raises(UserError, match="is no patch"):
        store.list_patches()
