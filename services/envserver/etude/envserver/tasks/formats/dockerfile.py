"""The lines of a Dockerfile as instructions: https://docs.docker.com/reference/dockerfile/."""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from etude.envserver.tasks.formats.imported_task import ImportRefusedError

_DIRECTIVE = re.compile(r"#\s*([A-Za-z]+)\s*=\s*(.*)")
_CONTINUES = re.compile(r"\\[ \t]*$")
_HEREDOC = re.compile(r"<<-?\s*['\"]?[A-Za-z_]")
_FLAG = re.compile(r"--([a-z-]+)(?:=(\S*))?(?:\s+|$)")
_VARIABLE = re.compile(
    r"\\(?P<escaped>.)|\$(?:(?P<name>[A-Za-z_]\w*)|\{(?P<braced>[A-Za-z_]\w*)(?P<rest>[^}]*)\}|(?P<bad>\{))"
)


class Instruction(NamedTuple):
    """One instruction, its continued lines joined."""

    line: int
    """Where it begins, from 1."""
    word: str
    """In capitals."""
    flags: Mapping[str, str]
    text: str

    def refuse(self, why: str) -> ImportRefusedError:
        """The error that names this line."""
        shown = f"{self.word} {self.text}".strip()[:80]
        return ImportRefusedError(f"environment/Dockerfile line {self.line}", f"`{shown}`: {why}")


def instructions(text: str) -> Iterator[Instruction]:
    """Every instruction in order.

    Raises:
        ImportRefusedError: a line is not an instruction, or its syntax is not supported.
    """
    for number, line in _logical(text):
        word, rest = (*line.split(None, 1), "", "")[:2]
        rest = rest.strip()
        found = Instruction(number, word.upper(), {}, rest)
        if not word.isalpha():
            raise found.refuse("is not an instruction")
        if _HEREDOC.search(rest) and found.word in {"RUN", "COPY", "ADD"}:
            raise found.refuse("here-documents are not read; write the lines with && and \\")
        flags = {}
        while found.word in {"RUN", "COPY", "ADD", "FROM"} and (flag := _FLAG.match(rest)):
            flags[flag[1]] = flag[2] or ""
            rest = rest[flag.end() :]
        yield found._replace(flags=flags, text=rest)


def _logical(text: str) -> Iterator[tuple[int, str]]:
    begun, parts = 0, list[str]()
    may_direct = True
    for number, raw in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        stripped = raw.strip()
        if stripped.startswith("#") or not stripped:
            match = _DIRECTIVE.fullmatch(stripped) if may_direct else None
            if match and match[1].lower() == "escape" and match[2] != "\\":
                where = f"environment/Dockerfile line {number}"
                raise ImportRefusedError(where, f"`{stripped}`: only \\ continues lines here")
            may_direct = may_direct and match is not None
            continue
        may_direct = False
        begun = begun or number
        parts.append(_CONTINUES.sub("", raw))
        if not _CONTINUES.search(raw):
            yield begun, "".join(parts)
            begun, parts = 0, []
    if parts:
        yield begun, "".join(parts)


def expand_variables(found: Instruction, text: str, values: Mapping[str, str]) -> str:
    """The text with its variables replaced.

    Raises:
        ImportRefusedError: a form of replacement that is not read here.
    """

    def one(match: re.Match[str]) -> str:
        if match["escaped"] is not None:
            return match["escaped"] if match["escaped"] in "$\\" else match[0]
        name, rest = match["name"] or match["braced"], match["rest"] or ""
        if match["bad"] or (rest and not rest.startswith((":-", "-"))):
            raise found.refuse("of ${…} only ${NAME} and ${NAME:-default} are read")
        default = rest.partition("-")[2]
        value = values.get(name)
        return default if value is None or (rest.startswith(":") and not value) else value

    return _VARIABLE.sub(one, text)
