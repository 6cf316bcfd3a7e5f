"""Engines that changed their weights many times, beside fresh ones: they must say the same."""

import asyncio
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.harness.chaos import journal
from tests.harness.chaos.engines import fresh
from tests.harness.chaos.engines.fresh import Answers, Export
from tests.harness.chaos.engines.process import EngineProcess
from tests.harness.chaos.engines.sampling import generated
from tests.harness.chaos.settings import Settings

from etude.common.weights import VersionId


class Said(NamedTuple):
    """What an engine said to the prompt of a version."""

    engine: str
    version: VersionId
    answers: Answers


@dataclass(slots=True)
class Comparison:
    """Of token ids and log-probs, with ==."""

    settings: Settings
    said: list[Said] = field(default_factory=list)
    exports: dict[VersionId, Export] = field(default_factory=dict)

    async def ask(self, engines: Sequence[EngineProcess], version: VersionId) -> None:
        """Ask engines that serve a version, while nothing else runs, and export it.

        Raises:
            EtudeError: it cannot be read.
        """
        for engine in engines:
            self.said.append(Said(engine.who, version, await probe(engine, version)))
        if version not in self.exports:
            self.exports[version] = await asyncio.to_thread(fresh.exported, self.settings, version)

    def mismatches(self) -> Iterator[str]:
        """Exports that differ from the ledger, and engines from a fresh one; takes minutes."""
        ledger = {line["version"]: line["sha"] for line in journal.read(self.settings.ledger)}
        for version, export in self.exports.items():
            if export.sha != ledger[str(version)]:
                yield f"the export of {version} has other words"
            try:
                expected = fresh.answers(export.folder, fresh.prompt_of(version))
            except subprocess.CalledProcessError as error:
                yield f"no fresh engine on {version}: {error.stderr[-500:]}"
                continue
            for each in self.said:
                if each.version == version and each.answers != expected:
                    yield f"{each.engine} under {version} says other things than a fresh engine"


async def probe(engine: EngineProcess, version: VersionId) -> Answers:
    """What an engine says to a version's prompt: one request after the other."""
    found: Answers = []
    for temperature in fresh.TEMPERATURES:
        tokens, logprobs, _ = await generated(
            engine,
            f"probe-{version}-{temperature}",
            fresh.prompt_of(version),
            max_tokens=fresh.TOKENS,
            temperature=temperature,
            seed=fresh.SEED,
        )
        found += [list(map(float, tokens)), logprobs]
    return found
