"""What the edge is told at its start."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from etude.envserver.node.sources import EMPTY
from etude.envserver.settings import ServerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeSettings:
    """Environment variables of an edge, read once."""

    server: ServerSettings
    broker_target: str
    keys_file: Path
    """One `name role digest` a line."""
    workspace: str
    """URI of the first files of a sandbox that somebody asks for."""
    max_sandboxes: int
    """At a time, over all keys."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Self:
        """The settings, or what is wrong with them.

        Raises:
            KeyError: naming a variable that is not set.
            ValueError: naming a variable that cannot be read.
        """
        most = env.get("ETUDE_EDGE_MAX_SANDBOXES", "100")
        if not most.isdecimal() or not 1 <= int(most) <= 10_000:
            raise ValueError(f"ETUDE_EDGE_MAX_SANDBOXES: {most!r} is not 1 to 10000")
        return cls(
            server=ServerSettings.from_env("7050", env),
            broker_target=env["ETUDE_BROKER_TARGET"],
            keys_file=Path(env["ETUDE_EDGE_KEYS"]),
            workspace=env.get("ETUDE_EDGE_WORKSPACE", EMPTY),
            max_sandboxes=int(most),
        )
