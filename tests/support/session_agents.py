"""Scripted agents of three skills at session tasks, with the real tools on files in memory."""

import asyncio
import json
from collections.abc import Callable, Iterator
from random import Random
from typing import NamedTuple

from etude.agent import toolsets
from etude.agent.tool_calls import ParsedCall
from etude.agent.workspace import ExecResult, MemoryWorkspace
from etude.demo.sessions.tasks import SessionTask
from etude.v1.rollout_pb2 import CallRecord

TOOLS = toolsets.toolset("Compact")
FORGETS = 0.4
"""Share of the tasks in which the hurried agent leaves out a module."""

Turn = list[ParsedCall]
Script = Callable[[SessionTask, Random], Iterator[Turn]]


class Work(NamedTuple):
    """Files that an agent left, and its calls."""

    files: dict[str, str]
    calls: list[CallRecord]


def _call(name: str, **arguments: str) -> ParsedCall:
    return ParsedCall(name=name, arguments=arguments)


def _edit(path: str, old: str, new: str) -> ParsedCall:
    return _call("search_replace", path=path, old_string=old, new_string=new)


def careful(task: SessionTask, _: Random) -> Iterator[Turn]:
    """Reads rules, logs and each module, then changes the cause and every module."""
    yield [_call("list_dir", path=task.package), _call("list_dir", path="docs")]
    yield [_call("grep", pattern=task.family.cause)]
    for change in task.changes:
        yield [_call("read_file", path=change.path)]
        if change.is_changed:
            yield [_edit(change.path, change.before, change.after)]


def hurried(task: SessionTask, random: Random) -> Iterator[Turn]:
    """Knows the cause, edits all at once without reading, and forgets a module now and then."""
    changes = [change for change in task.changes if change.is_changed]
    if random.random() < FORGETS:
        others = [change for change in changes if change.path != task.cause]
        changes.remove(random.choice(others))
    yield [_edit(each.path, each.before, each.after) for each in changes[:5]]
    yield [_edit(each.path, each.before, each.after) for each in changes[5:]]


def patching(task: SessionTask, _: Random) -> Iterator[Turn]:
    """Repairs the module that the user names, with what it needs inside of it."""
    files = {change.path: change for change in task.changes}
    shown, cause = files[f"{task.package}/{task.symptom}.py"], files[task.cause]
    name = task.family.cause
    rest = shown.after.replace(f"from {task.package} import {name}\n", "")
    own = f"\nfrom types import SimpleNamespace\n\n{name} = SimpleNamespace(**globals())\n"
    yield [_call("read_file", path=shown.path)]
    yield [_edit(shown.path, shown.before, cause.after + own + rest)]


SCRIPTS: dict[str, Script] = {"careful": careful, "hurried": hurried, "patching": patching}


def work(name: str, task: SessionTask, seed: int) -> Work:
    """Let an agent work on a task."""
    return asyncio.run(_work(SCRIPTS[name], task, Random(f"{name}/{seed}")))


async def _work(script: Script, task: SessionTask, random: Random) -> Work:
    async def run(command: str, timeout_s: float) -> ExecResult:
        raise AssertionError(f"no agent runs {command!r} for {timeout_s} s")

    files = {path: text.encode() for path, text in task.workspace().items()}
    workspace = MemoryWorkspace(files, run)
    calls: list[CallRecord] = []
    for number, turn in enumerate(script(task, random)):
        outcomes = await toolsets.run_calls(TOOLS, workspace, turn)
        assert not any(outcome.is_error for outcome in outcomes), outcomes
        calls += [
            CallRecord(
                turn=number,
                name=call.name,
                arguments_json=json.dumps(call.arguments),
                result=outcome.content[:4096],
            )
            for call, outcome in zip(turn, outcomes, strict=True)
        ]
    return Work({path: data.decode() for path, data in workspace.files.items()}, calls)
