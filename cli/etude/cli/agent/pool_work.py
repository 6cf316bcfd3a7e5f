"""Work in leased environments, whose changes come back as patches."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from etude.agent.interactive.folder_changes import FolderChanges, compare_folders
from etude.agent.interactive.session import AgentSession, ConversationEvents
from etude.agent.interactive.stored_patches import PatchStore, StoredPatch
from etude.agent.interactive.user_files import UserFile, find_ignored, pack_files, read_folder
from etude.cli.agent.conversation import ENDS, UserWork, WorkEnd
from etude.cli.agent.screen import TextScreen
from etude.cli.environments.client import EnvironmentRequest, find_pool
from etude.cli.environments.leased_tools import LeasedEnvironment, lease_environment
from etude.cli.output import Exit, say, say_problem
from etude.common.errors import EtudeError, Problem, UserError
from etude.common.feedback.client import EventClient

LEASE_S = 600
"""Life of a lease that nobody renews: of a process that was killed."""
_NO_FILES = "empty:"
"""First files: those of the folder come after."""


class PoolPlace(NamedTuple):
    """Environments that are asked for."""

    broker: str
    wish: EnvironmentRequest


def find_place(pool: str, pool_name: str, template: str, *, toolset: str, wait_s: int) -> PoolPlace:
    """Find a pool.

    Raises:
        UserError: it does not run, or its template is not clear.
    """
    found = find_pool(pool, pool_name)
    wish = EnvironmentRequest(
        template=template or found.choose_template(pool),
        ttl_s=LEASE_S,
        wait_s=wait_s,
        uri=_NO_FILES,
        toolset=toolset,
    )
    return PoolPlace(found.broker, wish)


def work_in_pool(work: UserWork, place: PoolPlace, instructions: Sequence[str]) -> Exit:
    """Work on instructions at the same time; returns the worst exit code.

    Raises:
        KeyboardInterrupt: the user stopped it; the tasks end as given up.
        SystemExit: a signal ended it; the tasks end as given up, too.
    """
    client = work.open_client()
    with WorkEnd(lambda: work.home.open_client(work.key)).watch(), asyncio.Runner() as runner:
        if client is not None:
            work.home.observe(client)
        copied = runner.run(read_folder(work.folder))
        if copied.num_left_out:
            say(f"{copied.num_left_out} links and large files are not copied")
        return runner.run(PoolWork(work, place, copied.files, client).run(instructions))


class FinishedWork(NamedTuple):
    """Changes of work in an environment."""

    changes: FolderChanges
    error: EtudeError | None
    """Error that ended it early; None if the policy or a limit did."""


@dataclass(frozen=True, slots=True)
class PoolWork:
    """Pieces of work on copies of one folder, each in an environment of its own."""

    work: UserWork
    place: PoolPlace
    files: Mapping[str, UserFile]
    """Files that are copied."""
    client: EventClient | None

    async def run(self, instructions: Sequence[str]) -> Exit:
        """Work on instructions at the same time; returns the worst exit code."""
        async with asyncio.TaskGroup() as group:
            pieces = [
                group.create_task(self._try_work(each, f"[{number}] " if number else ""))
                for number, each in enumerate(instructions, int(len(instructions) > 1))
            ]
        return max(each.result() for each in pieces)

    async def _try_work(self, instruction: str, label: str) -> Exit:
        """Work on an instruction; an error of one does not end the others.

        Raises:
            CancelledError: the user stopped it.
        """
        events = self.work.open_events(self.client)
        screen = TextScreen(accepts_edits=True, accepts_commands=True, ask=None, label=label)
        try:
            worked = await self._work(instruction, events, screen)
            await self._present(instruction, events, screen, worked)
        except asyncio.CancelledError:
            events.close("Abandoned")
            raise
        except EtudeError as error:
            events.close("Abandoned")
            say(f"{label}the work did not end:")
            return say_problem(error)
        if worked.error is None:
            return Exit.DONE
        say(f"{label}the work did not end:")
        return say_problem(worked.error)

    async def _work(
        self, instruction: str, events: ConversationEvents, screen: TextScreen
    ) -> FinishedWork:
        """Work in an environment; an error of the gateway leaves the changes made before it.

        Raises:
            EtudeError: no environment can be had, or its files cannot be read.
        """
        say(f"{screen.label}waits for a place in the pool")
        async with lease_environment(*self.place) as environment:
            await environment.unpack(pack_files(self.files))
            before = await _read_files(environment, self.files)
            name = environment.environment.name
            say(f"{screen.label}works in {name}, on a copy of {len(self.files)} files")
            session = AgentSession(events.policy, events, environment, screen, self.work.max_turns)
            error = None
            try:
                ending = await session.work(instruction)
            except EtudeError as raised:
                error = raised
            else:
                if ending in ENDS:
                    say(screen.label + ENDS[ending])
            after = await _read_files(environment, before)
        return FinishedWork(await asyncio.to_thread(self._compare, before, after), error)

    def _compare(
        self, before: Mapping[str, UserFile], after: Mapping[str, UserFile]
    ) -> FolderChanges:
        ignored = find_ignored(self.work.folder, after.keys() - before.keys())
        return compare_folders(before, {k: v for k, v in after.items() if k not in ignored})

    async def _present(
        self,
        instruction: str,
        events: ConversationEvents,
        screen: TextScreen,
        worked: FinishedWork,
    ) -> None:
        """Store and show a patch; without changes, the task ends here."""
        changes = worked.changes
        if not changes.files:
            say(f"{screen.label}nothing was changed")
            events.close("Closed" if worked.error is None else "Abandoned")
            return
        patch = StoredPatch(
            instruction=instruction,
            folder=str(self.work.folder),
            about=events.context(),
            turn=events.turn,
            files=changes.files,
        )
        store = PatchStore(self.work.home)
        store.add(patch, changes.patch)
        lines = changes.patch.decode("utf-8", "replace").splitlines()
        screen.show_diff(lines)
        events.add("shown", numLines=len(lines))
        if self.work.accepts_edits:
            await store.accept(patch, events.open_client())
            say(f"{screen.label}changed {len(patch.files)} files of {patch.folder}")
            return
        name = patch.short_name
        say(f"{screen.label}{len(patch.files)} files in {store.text_file(patch)}")
        say(f"{screen.label}to decide: etude agent accept {name}, or etude agent reject {name}")


async def _read_files(
    environment: LeasedEnvironment, earlier: Mapping[str, UserFile]
) -> dict[str, UserFile]:
    """Read the files of an environment that had these.

    Raises:
        UserError: a host hands back none of them.
    """
    diff = await environment.read_changes()
    if earlier and not diff.written:
        what = "holds more than a host hands back, or no file at all"
        fix = "let the work leave less behind: at most 20,000 files and folders, and 64 MiB"
        where = f"environment {environment.environment.name}"
        raise UserError(Problem("TooLarge", what, where, fix))
    return {each.path: UserFile(each.content, each.executable) for each in diff.written}
