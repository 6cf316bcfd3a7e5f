"""Settings of brokers and hosts, from environment variables."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from etude.common import broker_shards
from etude.common.broker_shards import BrokerShard
from etude.common.run_folder.state import images_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings that both roles have."""

    pool_file: Path
    """Resolved pool."""
    host: str
    port: int
    probe_port: int
    pod: str
    traces_file: Path | None
    otlp_endpoint: str | None

    @classmethod
    def from_env(cls, default_port: str, env: Mapping[str, str] = os.environ) -> Self:
        """Read the settings.

        Raises:
            KeyError: naming a variable that is not set.
            ValueError: naming a variable that cannot be read.
        """
        traces = env.get("ETUDE_TRACES_FILE")
        return cls(
            pool_file=Path(env["ETUDE_POOL_FILE"]),
            host=env.get("ETUDE_HOST", "127.0.0.1"),
            port=_port(env, "ETUDE_PORT", default_port),
            probe_port=_port(env, "ETUDE_PROBE_PORT", "8080"),
            pod=env.get("ETUDE_POD", "envserver"),
            traces_file=Path(traces) if traces else None,
            otlp_endpoint=env.get("ETUDE_OTLP_ENDPOINT") or None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSettings:
    """Settings of a broker."""

    server: ServerSettings
    shard: BrokerShard
    """This broker's place among the pool's brokers."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Self:
        """Read the settings.

        Raises:
            KeyError: naming a variable that is not set.
            ValueError: naming a variable that cannot be read.
        """
        try:
            shard = BrokerShard.parse(env.get("ETUDE_SHARD", "0/1"))
        except ValueError as error:
            raise ValueError(f"ETUDE_SHARD: {error}") from error
        return cls(server=ServerSettings.from_env("7020", env), shard=shard)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSettings:
    """Settings of a host."""

    server: ServerSettings
    broker_targets: tuple[str, ...]
    """host:port of each broker of the pool, in their order."""
    advertise: str
    """host:port where clients reach this host; empty: host and port that it listens on."""
    scratch: Path
    """Private folder; leases in it survive a restart."""
    images: Path
    """Folder of images for microVMs."""
    allow_weak_isolation: bool
    """True to let untrusted templates run in weak isolation."""
    egress_secrets: Path | None = None
    """Folder with a folder for each Secret in egress rules, and a file for each key."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Self:
        """Read the settings.

        Raises:
            KeyError: naming a variable that is not set.
            ValueError: naming a variable that cannot be read.
        """
        server = ServerSettings.from_env("7030", env)
        secrets = env.get("ETUDE_EGRESS_SECRETS")
        try:
            broker_targets = broker_shards.parse_targets(env["ETUDE_BROKER_TARGET"])
        except ValueError as error:
            raise ValueError(f"ETUDE_BROKER_TARGET: {error}") from error
        return cls(
            server=server,
            broker_targets=broker_targets,
            advertise=env.get("ETUDE_ADVERTISE", ""),
            scratch=Path(env["ETUDE_SCRATCH"]),
            images=images_folder(env),
            allow_weak_isolation=_flag(env, "ETUDE_ALLOW_WEAK_ISOLATION"),
            egress_secrets=Path(secrets) if secrets else None,
        )


def _port(env: Mapping[str, str], name: str, default: str) -> int:
    text = env.get(name, default)
    if not text.isdecimal() or int(text) > 65_535:
        raise ValueError(f"{name}: {text!r} is not a port number")
    return int(text)


def _flag(env: Mapping[str, str], name: str) -> bool:
    text = env.get(name, "0")
    if text not in {"0", "1"}:
        raise ValueError(f"{name}: {text!r} is not 0 or 1")
    return text == "1"
