"""Miner: breaks one function at a time, and keeps as tasks what the repository's tests notice."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from etude.envserver.tasks.formats.command import write_task
from etude.envserver.tasks.lint import TaskLinter
from etude.envserver.tasks.mining import mined_task, mutations
from etude.envserver.tasks.mining.journal import JournalLine, MiningJournal
from etude.envserver.tasks.mining.languages import MinedLanguage
from etude.envserver.tasks.mining.mined_task import FailingTests, NoTaskError
from etude.envserver.tasks.mining.mutations import Mutation
from etude.envserver.tasks.mining.repository import MinedRepository
from etude.envserver.tasks.mining.suite import SuiteReport, SuiteRunner, require_green
from etude.envserver.tasks.verify import TaskVerifier

PER_FUNCTION = 2
"""Mutations of one function that are tried at first, up to a task."""
NUM_MORE = 8
"""Mutations of one function, with a task or without, that are tried where these are too few."""
_MIN_TIMEOUT_S, _TIMES = 60.0, 10.0
"""Time limit of a mutated suite, at least, and in its usual times: some mutations never end."""
_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True, kw_only=True)
class MiningOptions:
    """Settings of a mining."""

    seed: int = 0
    num_tasks: int = 10
    num_runs: int = 3
    """Runs of the suite by which tests that do not always pass are found."""
    num_jobs: int = 1
    """Functions that are tried at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MutationOutcome:
    """Outcome of one mutation: a proved task that is not in its place yet, or a reason."""

    mutation: Mutation
    folder: Path | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskMiner:
    """Mines one repository into one folder."""

    repository: MinedRepository
    language: MinedLanguage
    suite: SuiteRunner
    options: MiningOptions
    journal: MiningJournal
    scratch: Path
    """Folder for tasks that are not proved, on the disk of the journal's folder."""
    say: Callable[[str], None]
    """Called with each line of progress."""

    def candidates(self, *, num_more: int = 0) -> list[list[Mutation]]:
        """Mutations of each function in the order in which they are tried."""
        found = [
            function
            for path, file in self.repository.files.items()
            if self.language.is_source(path)
            for function in mutations.list_mutations(path, file.content, self.language)
        ]
        seed = self.options.seed
        return mutations.choose_mutations(
            found, seed=seed, per_function=PER_FUNCTION, num_more=num_more
        )

    async def mine(self) -> int:
        """Try mutations until there are enough tasks; returns their number.

        Raises:
            UserError: the suite does not pass as it is.
            SandboxError: the platform failed; a later call goes on from here.
        """
        if not self.journal.stable_tests:
            await self._measure_suite()
        await self._try_functions(list(self._pending()))
        while self.journal.num_tasks < self.options.num_tasks:
            pending = list(self._more_pending())
            if not pending:
                break
            await self._try_functions(pending)
        return self.journal.num_tasks

    async def _try_functions(self, pending: list[list[Mutation]]) -> None:
        """Try mutations until there are enough tasks, at most one new task a function."""
        self.say(f"{sum(map(len, pending))} mutations of {len(pending)} functions to try")
        async with contextlib.aclosing(
            run_in_order(pending, self._try_function, self.options.num_jobs)
        ) as results:
            while self.journal.num_tasks < self.options.num_tasks:
                outcomes = await anext(results, None)
                if outcomes is None:
                    break
                for outcome in outcomes:
                    self._record(outcome)

    def _more_pending(self) -> Iterator[list[Mutation]]:
        """Find mutations that were not tried, of functions with a task too."""
        for function in self.candidates(num_more=NUM_MORE):
            if left := [each for each in function if each.key not in self.journal.outcomes]:
                yield left

    def _pending(self) -> Iterator[list[Mutation]]:
        outcomes = self.journal.outcomes
        for function in self.candidates():
            tried = [outcomes[each.key] for each in function if each.key in outcomes]
            left = [each for each in function if each.key not in outcomes]
            if left and not any(line.task_id for line in tried):
                yield left

    async def _measure_suite(self) -> None:
        reports = list[SuiteReport]()
        for number in range(self.options.num_runs):
            report = await self.suite.run(self.repository.workspace)
            reports.append(
                require_green(report, self.suite.command)
                if not number or report is None
                else report
            )
            seconds, tests = reports[-1].seconds, len(reports[-1].passing_tests)
            self.say(f"suite, run {number + 1}: {tests} tests pass in {seconds:.1f} s")
        stable = frozenset.intersection(*(report.passing_tests for report in reports))
        flaky = len(frozenset.union(*(report.passing_tests for report in reports)) - stable)
        if flaky:
            self.say(f"{flaky} tests do not always pass, and do not count")
        slowest_s = max(report.seconds for report in reports)
        line = JournalLine(stable_tests=tuple(sorted(stable)), suite_s=round(slowest_s, 3))
        self.journal.append(line)

    async def _try_function(self, function: list[Mutation]) -> list[MutationOutcome]:
        """Outcomes of a function's mutations, up to the first task."""
        outcomes = list[MutationOutcome]()
        for mutation in function:
            try:
                folder = await self._make_task(mutation)
            except NoTaskError as error:
                outcomes.append(MutationOutcome(mutation=mutation, reason=str(error)))
                continue
            outcomes.append(MutationOutcome(mutation=mutation, folder=folder))
            break
        return outcomes

    async def _make_task(self, mutation: Mutation) -> Path:
        """Write the task of a mutation to the scratch folder, and prove it.

        Raises:
            NoTaskError: it makes none.
        """
        task_id = self._task_id(mutation)
        source = self.repository.files[mutation.function.path]
        broken = source._replace(content=mutation.apply(source.content))
        found = await self._find_failing(
            self.repository.workspace | {mutation.function.path: broken}
        )
        task = mined_task.build_task(
            task_id,
            mutation,
            self.repository,
            found,
            mined_task.TaskSettings(
                language=self.language,
                command=self.suite.command,
                image=self.suite.image,
                timeout_s=self._timeout_s(),
                seed=self.options.seed,
            ),
        )
        write_task(task, self.scratch)
        folder = self.scratch / task_id
        runner = self.suite.runner
        proof = await TaskVerifier(runner, runner.grader()).verify_task(folder)
        if proof.findings:
            raise NoTaskError(f"is not proved: {proof.findings[0]}")
        lint = await TaskLinter(runner).lint_task(folder)
        if lint.findings:
            finding = lint.findings[0]
            raise NoTaskError(f"{finding.rule}: {finding.where} {finding.what}")
        return folder

    async def _find_failing(self, files: mined_task.Files) -> FailingTests:
        """Run the mutated suite as often as the lists of tests need to be sure.

        Raises:
            NoTaskError: too few tests fail or pass.
        """
        stable = frozenset(self.journal.stable_tests)
        failing, passing, errors = stable, stable, dict[str, int]()
        for _ in range(max(2, self.options.num_runs - 1)):
            report = await self.suite.run(files, timeout_s=self._timeout_s())
            if report is None:
                raise NoTaskError("its suite does not end in time, or leaves no report")
            failing -= report.passing_tests
            passing &= report.passing_tests
            errors = {**report.errors}
            mined_task.check_failing(failing, passing, stable)
        return FailingTests(
            failing=tuple(sorted(failing)), passing=tuple(sorted(passing)), errors=errors
        )

    def _record(self, outcome: MutationOutcome) -> None:
        """Put a task into its place, then note it: a crash in between is repaired by a retry."""
        mutation = outcome.mutation
        task_id = self._task_id(mutation) if outcome.folder is not None else ""
        if outcome.folder is not None and not (self.journal.folder / task_id).exists():
            outcome.folder.rename(self.journal.folder / task_id)
        self.journal.append(
            JournalLine(mutation=mutation.key, task_id=task_id, reason=outcome.reason)
        )
        where = f"{mutation.function.path}:{mutation.function.line} {mutation.function.name}"
        result = task_id or outcome.reason
        self.say(f"{self.journal.num_tasks} tasks  {where} {mutation.kind}: {result}")

    def _timeout_s(self) -> float:
        return min(self.suite.timeout_s, max(_MIN_TIMEOUT_S, _TIMES * self.journal.suite_s))

    def _task_id(self, mutation: Mutation) -> str:
        return mined_task.make_task_id(self.repository, mutation, seed=self.options.seed)


async def run_in_order(
    items: Iterable[_T], work: Callable[[_T], Awaitable[_R]], num_jobs: int
) -> AsyncGenerator[_R, None]:
    """Results of work on items in their order; `num_jobs` of them are worked on at a time.

    What is under way when the caller closes this is cancelled.
    """
    running = deque[asyncio.Future[_R]]()
    try:
        for item in items:
            running.append(asyncio.ensure_future(work(item)))
            if len(running) >= num_jobs:
                yield await running.popleft()
        while running:
            yield await running.popleft()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
