"""A demonstration in memory reads, byte for byte, like the same acts in a real folder."""

import asyncio
import sys
from pathlib import Path
from random import Random

from etude.agent.workspace import ExecResult, FolderWorkspace, Workspace
from etude.demo import demonstrations, intentions
from etude.demo.intentions import Intention
from etude.demo.problems import Problem, Source

COUNT = 60


def _in_folder(problem: Problem, root: Path) -> Workspace:
    for path, data in problem.workspace().items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)

    async def run(command: str, timeout_s: float) -> ExecResult:
        assert command == demonstrations.TEST_COMMAND
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-B", "-m", "etude.agent.minitest"),
            cwd=root,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await asyncio.wait_for(process.communicate(), timeout_s)
        return ExecResult(output=output, exit_code=process.returncode or 0)

    return FolderWorkspace(root, run)


async def test_memory_and_folder_give_the_same_transcript(tmp_path: Path) -> None:
    problems = list(Source(11).take("traces", COUNT))
    drawn = [intentions.draw(problem, Random(f"{i}")) for i, problem in enumerate(problems)]
    seen: set[str] = set()
    for index, (problem, intention) in enumerate(zip(problems, drawn, strict=True)):
        if not _is_new(intention, problem, seen):
            continue
        memory, folder = (
            demonstrations.in_memory(problem),
            _in_folder(problem, tmp_path / f"{index}"),
        )
        one, other = [
            await demonstrations.follow(intention, problem, demonstrations.tools_on(workspace))
            for workspace in (memory, folder)
        ]
        assert one == other
        assert await _files(memory) == await _files(folder)
    assert len(seen) >= 8, "too few kinds of demonstration to show anything"


async def _files(workspace: Workspace) -> dict[str, bytes]:
    return {path: await workspace.read(path) for path in await workspace.glob("**")}


def _is_new(intention: Intention, problem: Problem, seen: set[str]) -> bool:
    """One demonstration of each kind is enough: starting interpreters takes the time here."""
    kind = f"{problem.issue} {intention.gives_up} {len(intention.reads)} {len(intention.edits)}"
    kind += f" {intention.edits[0].is_verified}"
    is_new = kind not in seen
    seen.add(kind)
    return is_new
