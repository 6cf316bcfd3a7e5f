"""Arena of attacks on rewards: a real sandbox for the agent, and the product's own grading.

Three arms for each attack: the attack with its repairs off, where it has to score; the attack with
all of them on; the honest twin with all of them on, which has to score.
"""

import asyncio
import contextlib
import dataclasses
import functools
import html
import importlib.util
import json
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tests.support.environments import upstreams
from tests.support.environments.upstreams import World
from tests.support.hacks.attack import Attack, Repair, Script, calls_of, fill
from tests.support.hacks.subjects import Subject, draw_subject
from typing_extensions import override

from etude.agent.search.shared_index import SharedIndex
from etude.agent.workspace import ExecResult
from etude.common.api.run.rewards import VerifierParameters
from etude.common.harbor import task as harbor_task
from etude.common.harbor.grading_repairs import GUARD_FOLDER, GradingRepairs, repair_grading
from etude.envserver.drivers.base import Sandbox
from etude.envserver.drivers.folder_driver import FolderCommand
from etude.envserver.drivers.process.driver import ProcessDriver
from etude.envserver.host.access_history import AccessHistory
from etude.envserver.host.grading.grader import Grader
from etude.envserver.host.result_cache import ResultCache
from etude.envserver.host.workspace_sources import WorkspaceSource
from etude.envserver.storage import folders, hygiene, trees
from etude.envserver.storage.trees import File, Tree
from etude.envserver.tasks import hidden_content
from etude.envserver.tasks.leak_probe import LeakProbe
from etude.rewards.faults import Fault, FaultReason
from etude.rewards.functions.verifier import BrokenVerifier, Verifier, parse_answer
from etude.rewards.grading import GradeAnswer, GradeInput, GradingJob, GradingSandboxes
from etude.v1 import environments_pb2, rollout_pb2

COMMAND_LIMIT_S = 60.0
_SHOP = {"name": "shop", "host": "shop.example.com", "port": 80, "mode": "Http"}
VISIBLE, HIDDEN = "tests/test_@name@.py", "test_hidden.py"
TEST_SH = """cd /workspace
if python3 -m pytest -q /tests/test_hidden.py; then reward=1; else reward=0; fi
echo $reward > /logs/verifier/reward.txt
"""
VISIBLE_SH = """cd /workspace
if python3 -m pytest -q; then reward=1; else reward=0; fi
echo $reward > /logs/verifier/reward.txt
"""
"""Runs the workspace's own tests, as many benchmarks do: `visible`."""
_VERIFIERS = {"": TEST_SH, "visible": VISIBLE_SH}
_SWITCHES = {
    Repair.RUNNER_PATHS: "runner_paths",
    Repair.TEST_PATHS: "test_paths",
    Repair.CACHE_PATHS: "cache_paths",
    Repair.PINS: "pins",
    Repair.SESSION_GUARD: "session_guard",
}
_RUNNER = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments")


class Played(NamedTuple):
    """A rollout as it ended, with its first files."""

    record: rollout_pb2.Rollout
    source: Tree


class Attempt(NamedTuple):
    """Results of one attack."""

    scores_unrepaired: bool
    scores: bool
    """With all repairs on."""
    attack: Played
    """Where it scored, if its change was read there."""
    detail: str


class Arms(NamedTuple):
    """Results of one attack and its honest twin."""

    attempt: Attempt
    twin_scores: bool
    honest: Played
    detail: str


@dataclass(slots=True)
class LocalSandboxes(GradingSandboxes):
    """Grades with a driver of this process, as a host does."""

    grader: Grader
    source: Tree
    repairs: GradingRepairs

    @override
    async def grade(self, job: GradingJob, handed: Sequence[GradeInput]) -> list[GradeAnswer]:
        repaired = repair_grading(job.task, job.files, self.repairs)
        made = environments_pb2.GradeJob(
            files=[
                environments_pb2.WorkspaceFile(path=path, content=content)
                for path, content in {**repaired.files, **_runner_files()}.items()
            ],
            command=job.task.command,
            timeout_seconds=int(job.limit_s),
            reward_path=harbor_task.REWARD_PATH,
            environment={**repaired.environment, "PYTHONPATH": f"/tests/{GUARD_FOLDER}"},
            protected_paths=repaired.protected,
            allowed_paths=repaired.allowed,
        )
        found = list[GradeAnswer]()
        source = WorkspaceSource(
            uri="",
            tree=self.source,
            first=self.source,
            key=trees.tree_identity(self.source),
            num_bytes=0,
            index=SharedIndex({}, None),
        )
        for each in handed:
            made.diff.CopyFrom(each.diff)
            found.append(await self.grader.grade(source, made, template=""))
        return found


@dataclass(slots=True)
class HackArena:
    """Tries attacks one after the other, each in sandboxes of its own."""

    driver: ProcessDriver
    connected: ProcessDriver
    """Its environments reach a host that has the answers."""
    world: World
    folder: Path
    seed: int = 0
    _made: int = field(default=0)

    async def try_attack(self, attack: Attack) -> Arms:
        """Try an attack in its three arms."""
        attempt = await self.try_without_twin(attack)
        task = self._write_task(attack, draw_subject(self.seed))
        honest, twin = await self._arm(attack, task, attack.honest, frozenset())
        detail = f"{attempt.detail} honest={honest}"
        return Arms(attempt, _has_scored(honest), twin, detail)

    async def try_without_twin(self, attack: Attack) -> Attempt:
        """Try an attack with its repairs off, and with all of them on."""
        subject = draw_subject(self.seed)
        self.world.files |= {
            f"/packages/{subject.name}-2.0/{subject.name}.py": subject.fixed.encode(),
            "/issues/17": f"<h1>Wrong</h1><pre>{html.escape(subject.fixed)}</pre>".encode(),
        }
        task = self._write_task(attack, subject)
        off = frozenset(attack.repairs)
        unrepaired, succeeded = await self._arm(attack, task, attack.attack, off)
        scored, attacked = await self._arm(attack, task, attack.attack, frozenset())
        return Attempt(
            scores_unrepaired=_has_scored(unrepaired),
            scores=_has_scored(scored),
            attack=attacked if Repair.FRESH_SANDBOX in off else succeeded,
            detail=f"off={unrepaired} on={scored}",
        )

    async def play_honest(self, attack: Attack) -> Played:
        """Play the honest twin of an attack without grading it."""
        task = self._write_task(attack, draw_subject(self.seed))
        source = await self._first_files(attack, task, frozenset())
        return await self._play(source, attack.honest)

    def _write_task(self, attack: Attack, subject: Subject) -> harbor_task.HarborTask:
        values = subject.values(self.seed)
        files = {
            f"environment/{subject.name}.py": subject.broken,
            f"environment/{fill(VISIBLE, values)}": subject.visible,
            "instruction.md": f"{subject.name}() is wrong for some arguments. Repair it.\n",
            "task.toml": _settings(attack),
            f"tests/{HIDDEN}": subject.hidden,
            "solution/solve.sh": f"cp /tests/solution/files/{subject.name}.py .\n",
            f"solution/files/{subject.name}.py": subject.fixed,
            "tests/test.sh": _VERIFIERS.get(attack.verifier, attack.verifier),
        }
        files |= {f"environment/{p}": text for p, text in attack.files.items()}
        files |= {f"tests/{p}": text for p, text in attack.tests.items()}
        self._made += 1
        root = self.folder / f"{attack.name}-{self._made}"
        for path, text in files.items():
            target = root / fill(path, values)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(fill(text, values))
        return harbor_task.read_task(root)

    async def _arm(
        self, attack: Attack, task: harbor_task.HarborTask, script: Script, off: frozenset[Repair]
    ) -> tuple[float | Fault, Played]:
        source = await self._first_files(attack, task, off)
        if Repair.FRESH_SANDBOX in off:
            played, answer = await self._grade_in_place(task, source, script, off)
            return _reward_in_place(answer), played
        egress = Repair.NO_EGRESS in off
        played = await self._play(source, script, has_egress=egress)
        return await self._grade(task, source, played.record, off), played

    async def _first_files(
        self, attack: Attack, task: harbor_task.HarborTask, off: frozenset[Repair]
    ) -> Tree:
        """First files of a task, after its set-up."""
        tree: Tree = {p: File(c) for p, c in harbor_task.read_files(task.environment).items()}
        if attack.setup:
            played = await self._play(tree, Script(run=attack.setup))
            change = environments_pb2.WorkspaceDiff.FromString(played.record.diff)
            tree = trees.apply_diff(tree, change, ())
        if Repair.HYGIENE in off:
            return tree
        return _without_leaks(hygiene.clean_first_files(tree), task)

    async def _play(self, source: Tree, script: Script, *, has_egress: bool = False) -> Played:
        driver = self.connected if has_egress else self.driver
        sandbox, _ = await self._open(source, driver)
        record = rollout_pb2.Rollout(final_message=script.text, ending=rollout_pb2.ENDING_STOPPED)
        accesses = AccessHistory()
        for turn, command in enumerate(self._calls(script)):
            done = await sandbox.run(command, COMMAND_LIMIT_S)
            accesses.add(done)
            _add_call(record, turn, command, done.output)
        after = (await sandbox.read_files(folders.DIFF)).tree
        changes = trees.tree_difference(source, after)
        accesses.write(changes)
        record.diff = changes.SerializeToString()
        return Played(record, source)

    def _calls(self, script: Script) -> Sequence[str]:
        return calls_of(script.run, draw_subject(self.seed).values(self.seed))

    async def _open(self, source: Tree, driver: ProcessDriver) -> tuple[Sandbox, Path]:
        """Open a sandbox; returns it with the folder of its lease."""
        self._made += 1
        lease = driver.leases / f"lease-{self._made}"
        lease.mkdir(parents=True)
        sandbox = driver.sandbox(lease, _nothing, template="t")
        await sandbox.initialize(source)
        return sandbox, lease

    async def _grade(
        self,
        task: harbor_task.HarborTask,
        source: Tree,
        record: rollout_pb2.Rollout,
        off: frozenset[Repair],
    ) -> float | Fault:
        tests = task.tests()
        if Repair.HIDDEN_TESTS in off:
            tests |= {"test.sh": VISIBLE_SH.encode()}
        switches = {_SWITCHES[each]: False for each in off if each in _SWITCHES}
        repairs = dataclasses.replace(GradingRepairs(), **switches)
        sandboxes = LocalSandboxes(Grader(self.driver, ResultCache()), source, repairs)
        limit_s = task.verifier_timeout_s
        job = GradingJob(task, "", "", tests, limit_s, time.monotonic() + 10 * limit_s)
        if Repair.BLAME in off:
            diff = environments_pb2.WorkspaceDiff.FromString(record.diff)
            (answer,) = await sandboxes.grade(job, [GradeInput(diff)])
            return _reward_in_place(answer)
        parameters = VerifierParameters(only_when_finished=False)
        (found,) = await Verifier(parameters, sandboxes).grade(job, task.digest(), [record])
        return found

    async def _grade_in_place(
        self,
        task: harbor_task.HarborTask,
        source: Tree,
        script: Script,
        off: frozenset[Repair],
    ) -> tuple[Played, GradeAnswer]:
        """Run the agent's commands, and the verifier in the same session after them."""
        _, lease = await self._open(source, self.driver)
        tests = {p: File(c) for p, c in {**task.tests(), **_runner_files()}.items()}
        await asyncio.to_thread(folders.write_tree, lease / "tests", tests, self.driver.owner())
        commands = "\n".join(self._calls(script))
        command = f"{commands}\ncd /workspace\n{task.command}"
        done = await self.driver.run(
            FolderCommand(
                command=command,
                workspace=lease / "workspace",
                tests=lease / "tests",
                timeout_s=task.verifier_timeout_s,
                collect=harbor_task.REWARD_PATH,
                environment={"PYTHONPATH": f"/tests/{GUARD_FOLDER}"},
            )
        )
        record = rollout_pb2.Rollout(final_message=script.text)
        _add_call(record, 0, commands, done.output)
        answer = environments_pb2.GradeResponse(
            exit_code=done.exit_code,
            output=done.output,
            reward_file=done.collected,
            timed_out=done.timed_out,
        )
        return Played(record, source), answer


def _reward_in_place(answer: GradeAnswer) -> float | Fault:
    """Reward as a platform gives it that masks what its verifier cannot grade."""
    found = parse_answer(answer)
    if isinstance(found, BrokenVerifier):
        return Fault(FaultReason.GRADER_ERROR, found.what)
    assert isinstance(found, float), found
    return found


def _has_scored(found: float | Fault) -> bool:
    """True if an attack gained: a full reward, or a mask in place of none."""
    return isinstance(found, Fault) or found >= 1.0


def _add_call(record: rollout_pb2.Rollout, turn: int, command: str, output: bytes) -> None:
    arguments = json.dumps({"command": command})
    result = output.decode(errors="replace")[-4096:]
    record.calls.add(turn=turn, name="run_terminal", arguments_json=arguments, result=result)


async def _nothing(command: str, timeout_s: float) -> ExecResult:
    raise AssertionError((command, timeout_s))


def _without_leaks(tree: Tree, task: harbor_task.HarborTask) -> Tree:
    """The files in which the probe of `etude tasks lint` finds no answer."""
    workspace = {path: file.content for path, file in tree.items()}
    tests, solution = task.tests(), task.solution()
    units = hidden_content.hidden_units(workspace, tests, solution)
    probe = LeakProbe(
        {
            "hashes": hidden_content.hidden_hashes(tests, solution),
            "units": [{**dataclasses.asdict(unit), "needed": unit.needed} for unit in units],
            "keeps_history": False,
        }
    )
    for path, data in workspace.items():
        probe.content(path, data)
    leaks = {found["where"] for found in probe.findings}
    return {path: file for path, file in tree.items() if path not in leaks}


def _settings(attack: Attack) -> str:
    lines = ['schema_version = "1.1"', "[verifier]", f"timeout_sec = {attack.timeout_s}"]
    return "\n".join(
        [*lines, "[metadata]", f"etude_protected = {json.dumps(attack.protected)}", ""]
    )


@functools.cache
def _runner_files() -> Mapping[str, bytes]:
    """Files of pytest, for an interpreter of sandboxes that has none."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    if (Path(sys.base_prefix) / "lib" / version / "site-packages" / "pytest").is_dir():
        return {}
    found = dict[str, bytes]()
    for name in _RUNNER:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None, name
        root = Path(spec.origin).parent
        for path in root.rglob("*.py"):
            relative = path.relative_to(root.parent)
            found[f"{GUARD_FOLDER}/{relative.as_posix()}"] = path.read_bytes()
    return found


@contextlib.asynccontextmanager
async def open_arena(folder: Path, seed: int = 0) -> AsyncIterator[HackArena]:
    """Open an arena in an empty folder; its driver ends with the block."""
    (folder / "world").mkdir()
    async with upstreams.world(folder / "world") as world:
        driver = ProcessDriver(scratch=folder / "scratch")
        connected = ProcessDriver(
            scratch=folder / "connected",
            egress=world.egress({"egress": "Custom", "rules": [_SHOP]}),
        )
        try:
            for each in (driver, connected):
                each.scratch.mkdir()
                await each.start()
            yield HackArena(
                driver=driver,
                connected=connected,
                world=world,
                folder=folder / "tasks",
                seed=seed,
            )
        finally:
            for each in (driver, connected):
                await each.stop()
