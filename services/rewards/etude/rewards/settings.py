"""Settings of the reward service from its environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from etude.common.pools.broker_shards import brokers_by_environment
from etude.common.settings_fields import parse_path, parse_port


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Environment variables, read once."""

    run_file: Path
    """Resolved run: its rubric, storage and environments."""
    brokers: Mapping[str, str]
    """Brokers of each pool, by environment name in the run: host:port, or several with commas."""
    scratch: Path
    """Private folder for task sets that come from an object store."""
    host: str
    port: int
    probe_port: int
    traces_file: Path | None
    judge_key: str = field(default="", repr=False)
    """Bearer token for the endpoints of Judge functions; empty for none."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Self:
        """Read the settings.

        Raises:
            KeyError: names a variable that is not set.
            ValueError: names a variable that is invalid.
        """
        return cls(
            run_file=Path(env["ETUDE_RUN_FILE"]),
            brokers=brokers_by_environment(env["ETUDE_BROKERS"]),
            scratch=Path(env["ETUDE_SCRATCH"]),
            host=env.get("ETUDE_HOST", "127.0.0.1"),
            port=parse_port(env, "ETUDE_PORT", 7040),
            probe_port=parse_port(env, "ETUDE_PROBE_PORT", 8080),
            traces_file=parse_path(env, "ETUDE_TRACES_FILE"),
            judge_key=_parse_key(env),
        )


def _parse_key(env: Mapping[str, str]) -> str:
    """The key of JUDGE_API_KEY, which people also set for other programs.

    Raises:
        ValueError: it cannot stand in a header; the message does not repeat it.
    """
    key = env.get("JUDGE_API_KEY", "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ValueError("JUDGE_API_KEY: has characters that no key has")
    return key
