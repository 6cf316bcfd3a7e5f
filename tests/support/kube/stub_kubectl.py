"""A program that stands for kubectl: it says what a test wants, and tells what it was asked."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

SCRIPT = """#!/bin/sh
cd {folder} || exit 1
echo "$*" >> asked
for answer in [0-9]*; do
  case "$*" in *"$(cat "$answer/words")"*) ;; *) continue ;; esac
  given=$(($(cat "$answer/given") + 1))
  [ -d "$answer/$given" ] && echo "$given" > "$answer/given" || given=$((given - 1))
  case "$1" in create) cat > made ;; esac
  cat "$answer/$given/said"
  cat "$answer/$given/complained" >&2
  exit "$(cat "$answer/$given/code")"
done
echo "error: nobody taught this kubectl $*" >&2
exit 1
"""


class Said(NamedTuple):
    """One answer."""

    said: str = ""
    complained: str = ""
    code: int = 0


def complaint(words: str) -> Said:
    """An answer of kubectl when something fails."""
    return Said("", words, 1)


def shown(manifest: object) -> Said:
    """An answer with an object."""
    return Said(json.dumps(manifest))


@dataclass(slots=True)
class StubKubectl:
    """Answers by what is in its command line; the first teaching that fits answers."""

    folder: Path
    _num_taught: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.program.write_text(SCRIPT.format(folder=self.folder))
        self.program.chmod(0o755)

    @property
    def program(self) -> Path:
        """Where it is."""
        return self.folder / "kubectl"

    def teach(self, words: str, *answers: Said) -> None:
        """What it answers to such a command line, one time after the other; the last one stays."""
        self._num_taught += 1
        place = self.folder / f"{self._num_taught:03}"
        place.mkdir()
        (place / "words").write_text(words)
        (place / "given").write_text("0")
        for number, answer in enumerate(answers, start=1):
            (place / str(number)).mkdir()
            for name, value in answer._asdict().items():
                (place / str(number) / name).write_text(str(value))

    def teach_cluster(self, run: dict[str, Any], around: Sequence[dict[str, Any]] = ()) -> None:
        """A run and what stands around it."""
        self.teach("get rlruns.etude.dev", shown(run))
        for kinds, found in (
            ("envpools.etude.dev,checkpoints.etude.dev", {"EnvPool", "Checkpoint"}),
            ("pods", {"Pod", "StatefulSet"}),
            ("events", set[str]()),
        ):
            items = [each for each in around if each["kind"] in found]
            self.teach(f"get {kinds}", shown({"items": items}))

    def asked(self, verb: str) -> list[str]:
        """The command lines of one verb, in their order."""
        path = self.folder / "asked"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if line.startswith(f"{verb} ")]

    def patches(self) -> list[Any]:
        """What was changed, in its order."""
        lines = self.asked("patch")
        return [json.loads(line.partition(" -p ")[2].partition(" -o ")[0]) for line in lines]

    def made(self) -> Any:
        """The object that it was to make last."""
        return json.loads((self.folder / "made").read_text())
