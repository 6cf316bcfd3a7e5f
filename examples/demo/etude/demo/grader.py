"""The verifier of a generated task: copied into its tests/ folder, run inside the sandbox.

    python3 /tests/verify.py [WORKSPACE [REWARD_FILE]]

Reads cases.json beside itself: {"modules": [{"path", "function", "calls": [{"arguments",
"expected"}]}]}. The reward is 1 if every call returns what is expected, else 0.

Covered: the agent's code runs in a forked child that is told the arguments only, in its own
process group, without this process's output; what it returns is compared here, as JSON, so that
patched asserts, objects equal to everything, `sys.exit`, early `os._exit`, printed verdicts,
conftest.py and sitecustomize.py change nothing; cases.json is removed, where the sandbox lets us,
before the child learns anything; the reward file is written last, replacing whatever is there.
Not covered: code that leaves its process group and then reads this process's memory or writes the
reward file again. The sandbox is thrown away after grading, so nothing outlives that race.

Standard library only.
"""

import contextlib
import importlib.util
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

TIMEOUT_S = 5.0
"""For all calls together: a right solution needs milliseconds."""

MAX_ANSWER_BYTES = 1 << 20
RAISED = {"raised": True}


def main(arguments: list[str]) -> int:
    """Grade, write the reward, say how many functions passed and nothing else."""
    workspace = Path(arguments[0] if arguments else "/workspace")
    reward = Path(arguments[1] if len(arguments) > 1 else "/logs/verifier/reward.txt")
    passed, total = grade(workspace, Path(__file__).with_name("cases.json"))
    _replace(reward, "1\n" if passed == total else "0\n")
    print(f"{passed} of {total} functions behave as asked")
    return 0


def grade(workspace: Path, cases: Path) -> tuple[int, int]:
    """How many of the modules answer every call as expected, and how many there are."""
    request_out, request_in = os.pipe()
    answer_out, answer_in = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(request_in)
        os.close(answer_out)
        _child(workspace, request_out, answer_in)
    os.close(request_out)
    os.close(answer_in)
    # Read only now: the child's memory was copied before the expected answers existed.
    modules = json.loads(cases.read_bytes())["modules"]
    with contextlib.suppress(OSError):
        cases.unlink()
    try:
        _send(request_in, [_question(module) for module in modules])
        answers = _receive(answer_out)
    finally:
        _kill(child)
        os.close(answer_out)
    return sum(map(_is_right, modules, answers + [None] * len(modules))), len(modules)


def _question(module: dict[str, object]) -> dict[str, object]:
    calls = module["calls"]
    assert isinstance(calls, list)  # noqa: S101 - cases.json comes from the generator
    return {**module, "calls": [call["arguments"] for call in calls]}


def _is_right(module: dict[str, object], answers: object) -> bool:
    calls = module["calls"]
    assert isinstance(calls, list)  # noqa: S101 - cases.json comes from the generator
    return answers == [call["expected"] for call in calls]


def _send(descriptor: int, questions: object) -> None:
    # A child that died already is found out by its missing answer.
    with contextlib.suppress(BrokenPipeError), os.fdopen(descriptor, "wb") as pipe:
        pipe.write(json.dumps(questions).encode())


def _receive(descriptor: int) -> list[object]:
    data = b""
    deadline = time.monotonic() + TIMEOUT_S
    # A line ends the answer: a helper that the code left running may hold the pipe open.
    while len(data) <= MAX_ANSWER_BYTES and not data.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([descriptor], [], [], left)[0]:
            return []
        piece = os.read(descriptor, 65_536)
        if not piece:
            break
        data += piece
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return []
    return found if isinstance(found, list) else []


def _kill(child: int) -> None:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(text)
    partial.replace(path)


def _child(workspace: Path, request: int, answer: int) -> NoReturn:
    """Answer the questions with the agent's code, then end without running any exit handler."""
    # Bound before the agent's code runs, which may replace what the name leads to.
    leave = os._exit
    try:
        _answer(workspace, request, answer)
    finally:
        leave(0)


def _answer(workspace: Path, request: int, answer: int) -> None:
    os.setpgid(0, 0)
    silence = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(silence, standard)
    os.chdir(workspace)
    sys.path.insert(0, str(workspace))
    sys.dont_write_bytecode = True
    with os.fdopen(request, "rb") as pipe:
        questions = json.load(pipe)
    answers = [_answers(workspace, question) for question in questions]
    with os.fdopen(answer, "wb") as pipe:
        pipe.write(json.dumps(answers, default=_refuse).encode() + b"\n")


def _answers(workspace: Path, question: dict[str, object]) -> list[object]:
    try:
        function = _load(workspace / str(question["path"]), str(question["function"]))
    except BaseException:  # noqa: BLE001 - the agent's code may raise anything
        return []
    calls = question["calls"]
    assert isinstance(calls, list)  # noqa: S101 - cases.json comes from the generator
    return [_call(function, arguments) for arguments in calls]


def _load(path: Path, name: str) -> Callable[..., object]:
    module_name = ".".join(path.with_suffix("").parts[-2:])
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None  # noqa: S101, PT018 - a .py file has both
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    function: Callable[..., object] = getattr(module, name)
    return function


def _call(function: Callable[..., object], arguments: list[object]) -> object:
    try:
        return function(*arguments)
    except BaseException:  # noqa: BLE001 - the agent's code may raise anything
        return RAISED


def _refuse(value: object) -> object:
    return {"unanswerable": type(value).__name__}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
