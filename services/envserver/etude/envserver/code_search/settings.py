"""Settings of code search as a service, from environment variables."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from etude.common.api.pool.spec import SearchSettings
from etude.common.settings_fields import parse_path, parse_port


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeSearchSettings:
    """Settings of the service."""

    host: str
    port: int
    probe_port: int
    tls_folder: Path | None
    """Folder with tls.crt and tls.key."""
    search: SearchSettings
    """Embedder, as pools name it."""
    scratch: Path
    """Folder for an encoder from an object store."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Self:
        """Read the settings.

        Raises:
            KeyError: naming a variable that is not set.
            ValueError: naming a variable that cannot be read.
        """
        values = {
            "backend": env.get("ETUDE_SEARCH_BACKEND"),
            "models": env.get("ETUDE_SEARCH_MODELS"),
        }
        return cls(
            host=env.get("ETUDE_HOST", "127.0.0.1"),
            port=parse_port(env, "ETUDE_PORT", 7070),
            probe_port=parse_port(env, "ETUDE_PROBE_PORT", 8080),
            tls_folder=parse_path(env, "ETUDE_SEARCH_TLS"),
            search=SearchSettings.model_validate({k: v for k, v in values.items() if v}),
            scratch=Path(env["ETUDE_SCRATCH"]),
        )
