"""`python -m etude.agent.chat.trial CPU_S FOLDER [SCHEMAS…]`: try a chat format, within limits.

A template is a program: it can loop for ever or fill the memory. It is tried once, in a process
that the kernel stops, before the same template is rendered in processes that must not hang.
"""

import contextlib
import json
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from etude.agent.chat.conversation import DeltaError
from etude.agent.chat.folder import read_json
from etude.agent.chat.format import ChatFormat
from etude.agent.chat.native_form import find_native_form
from etude.agent.chat.template import TemplateError, read_template, refuse_template
from etude.agent.chat.vocabulary import Vocabulary
from etude.agent.tool_calls import ParsedCall
from etude.agent.tool_messages import ShownTools, make_call_message, make_result_messages
from etude.common.errors import InvalidFieldError, Problem, UserError

Schemas = Sequence[Mapping[str, object]]
"""JSON schema of each tool of a toolset."""
CPU_S = 10
"""CPU time of all renderings; those of the largest templates known take 0.1 s."""
MEMORY_BYTES = 2 << 30
"""Memory beyond what the tokenizer takes."""
_WALL_S = 300.0
_RESULTS = ("first result\n", "", "  third {{ result }} {% raw %}")
_PARAMETERS = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "description": "Path of the file."},
        "lines": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["path"],
}
_TOOLS: Schemas = [
    {
        "type": "function",
        "function": {"name": name, "description": "Reads.", "parameters": _PARAMETERS},
    }
    for name in ("read_file", "list_folder")
]
_CALLS = [ParsedCall(name="read_file", arguments={"path": "a.py", "lines": [1, 2]})] * 2


def check_chat_format(
    model_folder: Path, *, native_tools: Sequence[Schemas] = (), cpu_s: int = CPU_S
) -> None:
    """Try a model's chat format in a process of its own, which may take `cpu_s` for rendering.

    Args:
        model_folder: with tokenizer and template.
        native_tools: schemas of toolsets that the template must show and have calls for.
        cpu_s: CPU time of all renderings.

    Raises:
        UserError: the tokenizer or the template does not work, or the template takes too long.
    """
    command = [sys.executable, "-m", "etude.agent.chat.trial", str(cpu_s), str(model_folder)]
    command += map(json.dumps, native_tools)
    try:
        done = subprocess.run(command, capture_output=True, timeout=_WALL_S, check=False)
    except subprocess.TimeoutExpired:
        _refuse_template(model_folder, f"the chat template did not finish within {_WALL_S:g} s")
        return
    if done.returncode == 0:
        return
    try:
        problem = Problem(*json.loads(done.stdout))
    except (ValueError, TypeError):
        error = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        why = f"signal {-done.returncode}" if done.returncode < 0 else error[:300]
        what = (
            f"the chat template failed, or took more than {cpu_s} s of CPU or"
            f" {MEMORY_BYTES >> 30} GiB of memory, for a few short messages ({why})"
        )
        _refuse_template(model_folder, what)
        return
    raise UserError(problem)


def _refuse_template(model_folder: Path, what: str) -> None:
    found = read_template(model_folder, read_json(model_folder / "tokenizer_config.json"))
    refuse_template(found[1] if found else model_folder, what)


def _limit(cpu_s: int) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + 1 + cpu_s
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _try(cpu_s: int, model_folder: Path, tools: Sequence[Schemas]) -> None:
    """Load the format, and render what rollouts and supervised data have it render.

    That is three turns of text, a transcript with tools, and a turn with each toolset in the
    model's own form.
    """
    vocabulary = Vocabulary.load(model_folder)
    _limit(cpu_s)
    chat = ChatFormat.of(vocabulary)
    tags = "".join(f"a{tag}b" for tag in vocabulary.tags)
    try:
        conversation = chat.open("A system prompt.", tags)
        for results in (_RESULTS, (tags,), ("last",)):
            conversation.add_completion("I call a tool.")
            with contextlib.suppress(DeltaError):  # then a new link starts
                conversation.append_results(results)
            conversation.render_again()
    except TemplateError as error:
        refuse_template(chat.template.path, f"the chat template cannot continue a turn: {error}")
    _try_transcript(chat)
    for schemas in tools:
        find_native_form(chat, schemas)


def _try_transcript(chat: ChatFormat) -> None:
    """Encode a transcript with tools, in both forms of a call's arguments."""
    for has_text in (False, True):
        shown = ShownTools(schemas=_TOOLS, has_text_arguments=has_text)
        turn = make_call_message(shown, "I look.", _CALLS, first=0)
        messages = [
            {"role": "system", "content": "A system prompt."},
            {"role": "user", "content": "An instruction."},
            turn,
            *make_result_messages(turn, _RESULTS[:2]),
            {"role": "assistant", "content": "The last turn."},
        ]
        with contextlib.suppress(InvalidFieldError):  # a template need not take tools
            chat.encode_messages(messages, _TOOLS)


def main() -> None:
    """Exit with 0 if the format works; otherwise print the problem.

    Raises:
        SystemExit: it does not work.
    """
    try:
        _try(int(sys.argv[1]), Path(sys.argv[2]), [json.loads(text) for text in sys.argv[3:]])
    except UserError as error:
        sys.stdout.write(json.dumps(error.problem))
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
