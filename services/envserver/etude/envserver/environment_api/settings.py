"""Settings of the environment API, from environment variables."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from etude.common.pools import broker_shards
from etude.common.settings_fields import parse_count, parse_path, parse_port
from etude.envserver.host.workspace_sources import EMPTY

RUN_ID = "edge"
"""Run id of the environment API's leases, the same for all brokers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentApiSettings:
    """Settings of the environment API."""

    host: str
    port: int
    probe_port: int
    brokers: str
    """Where the pool's brokers are found."""
    keys_file: Path
    """One `name role digest` a line."""
    tls_folder: Path | None
    """Folder with tls.crt and tls.key; plain HTTP without it."""
    workspace: str
    """URI of the first files of a client's sandbox."""
    max_sandboxes: int
    """At a time, over all keys."""
    memory_mib: int
    """Memory of each sandbox, as the pool's slot has it, for clients. 1,024 is Process's."""
    disk_mib: int
    """Disk of each sandbox, as the pool's slot has it, for clients. 10,240 is that of VMs."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Self:
        """Read the settings.

        Raises:
            KeyError: naming a variable that is not set.
            ValueError: naming a variable that cannot be read.
        """
        return cls(
            host=env.get("ETUDE_HOST", "127.0.0.1"),
            port=parse_port(env, "ETUDE_PORT", 7050),
            probe_port=parse_port(env, "ETUDE_PROBE_PORT", 8080),
            brokers=_brokers(env["ETUDE_BROKER_TARGET"]),
            keys_file=Path(env["ETUDE_EDGE_KEYS"]),
            tls_folder=parse_path(env, "ETUDE_EDGE_TLS"),
            workspace=env.get("ETUDE_EDGE_WORKSPACE", EMPTY),
            max_sandboxes=parse_count(env, "ETUDE_EDGE_MAX_SANDBOXES", 100, high=10_000),
            memory_mib=parse_count(env, "ETUDE_EDGE_MEMORY_MIB", 1024, high=65_536),
            disk_mib=parse_count(env, "ETUDE_EDGE_DISK_MIB", 10_240, high=1_048_576),
        )


def _brokers(text: str) -> str:
    try:
        broker_shards.parse_targets(text)
    except ValueError as error:
        raise ValueError(f"ETUDE_BROKER_TARGET: {error}") from error
    return text
