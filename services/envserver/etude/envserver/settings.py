"""Settings of brokers and hosts, from environment variables."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from etude.common.pools import broker_shards
from etude.common.rpc.broker_addresses import BrokerAddresses
from etude.common.run_folder.state import images_folder
from etude.common.settings_fields import parse_count, parse_flag, parse_path, parse_port

MAX_DRAIN_S = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings that both roles have."""

    host: str
    port: int
    probe_port: int
    pod: str
    traces_file: Path | None
    otlp_endpoint: str | None

    @classmethod
    def from_env(cls, default_port: int, env: Mapping[str, str] = os.environ) -> Self:
        """Read the settings.

        Raises:
            KeyError: naming a variable that is not set.
            ValueError: naming a variable that cannot be read.
        """
        return cls(
            host=env.get("ETUDE_HOST", "127.0.0.1"),
            port=parse_port(env, "ETUDE_PORT", default_port),
            probe_port=parse_port(env, "ETUDE_PROBE_PORT", 8080),
            pod=env.get("ETUDE_POD", "envserver"),
            traces_file=parse_path(env, "ETUDE_TRACES_FILE"),
            otlp_endpoint=env.get("ETUDE_OTLP_ENDPOINT") or None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSettings:
    """Settings of a broker."""

    server: ServerSettings
    pool_file: Path
    """Resolved pool."""
    addresses: BrokerAddresses | None
    """Where the pool's brokers are found; None: this one is alone."""
    advertise: str
    """host:port where others reach this broker; empty: host and port that it listens on."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Self:
        """Read the settings.

        Raises:
            KeyError: naming a variable that is not set.
            ValueError: naming a variable that cannot be read.
        """
        text = env.get("ETUDE_BROKER_TARGET", "")
        return cls(
            server=ServerSettings.from_env(7020, env),
            pool_file=Path(env["ETUDE_POOL_FILE"]),
            addresses=BrokerAddresses(_targets(text)) if text else None,
            advertise=env.get("ETUDE_ADVERTISE", ""),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSettings:
    """Settings of a host."""

    server: ServerSettings
    pool_file: Path | None
    """Resolved pool; without a file, the brokers describe it."""
    brokers: BrokerAddresses
    """Where the pool's brokers are found."""
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

    drain_s: float = 0.0
    """How long a host that is told to stop waits for its leases to end; its successor adopts none
    where they end with the pod."""
    pull_credentials: Path | None = None
    """Credentials of registries, in the format of Docker's config.json."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Self:
        """Read the settings.

        Raises:
            KeyError: naming a variable that is not set.
            ValueError: naming a variable that cannot be read.
        """
        server = ServerSettings.from_env(7030, env)
        return cls(
            server=server,
            pool_file=parse_path(env, "ETUDE_POOL_FILE"),
            brokers=BrokerAddresses(_targets(env["ETUDE_BROKER_TARGET"])),
            advertise=env.get("ETUDE_ADVERTISE", ""),
            scratch=Path(env["ETUDE_SCRATCH"]),
            images=images_folder(env),
            allow_weak_isolation=parse_flag(env, "ETUDE_ALLOW_WEAK_ISOLATION"),
            egress_secrets=parse_path(env, "ETUDE_EGRESS_SECRETS"),
            drain_s=float(parse_count(env, "ETUDE_DRAIN_S", 0, high=MAX_DRAIN_S)),
            pull_credentials=parse_path(env, "ETUDE_PULL_CREDENTIALS"),
        )


def _targets(text: str) -> str:
    try:
        broker_shards.parse_targets(text)
    except ValueError as error:
        raise ValueError(f"ETUDE_BROKER_TARGET: {error}") from error
    return text
