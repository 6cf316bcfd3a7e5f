"""Settings of the feedback service from its environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from etude.common.api.storage import StoreAccess
from etude.common.settings_fields import parse_path, parse_port


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Environment variables, read once."""

    ledger: str
    """Name of the ledger. A store holds one, and refuses another name."""
    store: str
    """URI of the folder or bucket with the ledger."""
    key_store: str
    """URI of the folder or bucket with the users' keys: without versions, without backups."""
    access: StoreAccess
    """Endpoint and region of both."""
    secret_file: Path
    """64 hexadecimal digits."""
    keys_file: Path
    """API keys: one `user scopes digest options` a line."""
    host: str
    port: int
    probe_port: int
    tls_folder: Path | None
    """Folder with tls.crt and tls.key; plain HTTP without it."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Self:
        """Read the settings.

        Raises:
            KeyError: names a variable that is not set.
            ValueError: names a variable that is invalid.
        """
        store, key_store = env["ETUDE_FEEDBACK_STORE"], env["ETUDE_FEEDBACK_KEY_STORE"]
        if f"{key_store.rstrip('/')}/".startswith(f"{store.rstrip('/')}/"):
            raise ValueError(
                "ETUDE_FEEDBACK_KEY_STORE: lies in ETUDE_FEEDBACK_STORE, whose backups would keep"
                " erased users readable: use another bucket or folder"
            )
        return cls(
            ledger=env.get("ETUDE_FEEDBACK_LEDGER", "feedback"),
            store=store,
            key_store=key_store,
            access=StoreAccess(
                endpoint=env.get("ETUDE_FEEDBACK_STORE_ENDPOINT") or None,
                region=env.get("ETUDE_FEEDBACK_STORE_REGION") or None,
            ),
            secret_file=Path(env["ETUDE_FEEDBACK_SECRET_FILE"]),
            keys_file=Path(env["ETUDE_FEEDBACK_API_KEYS"]),
            host=env.get("ETUDE_HOST", "127.0.0.1"),
            port=parse_port(env, "ETUDE_PORT", 7060),
            probe_port=parse_port(env, "ETUDE_PROBE_PORT", 8080),
            tls_folder=parse_path(env, "ETUDE_FEEDBACK_TLS"),
        )
