"""Settings of the feedback service from its environment."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from etude.common.api.storage import StoreAccess
from etude.common.settings_fields import parse_count, parse_path, parse_port
from etude.feedback.release.rules import ReleaseSettings
from etude.feedback.turn_removal import VARIABLE
from etude.feedback.windows.settings import (
    MAX_WINDOW_ROLLOUTS,
    WindowRules,
    parse_actions,
    parse_weights,
)

_MAX_S = 30 * 86_400
_MAX_RETENTION_S = 3_650 * 86_400
T = TypeVar("T")


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
    windows: WindowRules
    turn_retention_s: int
    """Age at which recorded turns are removed; 0: see `choose_retention_s`."""
    tables_s: int
    """Seconds between two updates of the tables; 0: none are written."""
    release: ReleaseSettings | None
    """Without it nothing is released here."""

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
        windows = _parse_windows(env)
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
            windows=windows,
            turn_retention_s=parse_count(env, VARIABLE, 0, low=0, high=_MAX_RETENTION_S),
            tables_s=parse_count(env, "ETUDE_FEEDBACK_TABLES_S", 300, low=0, high=86_400),
            release=_parse_release(env, windows.horizon_s),
        )


def _parse_windows(env: Mapping[str, str]) -> WindowRules:
    num_rollouts = parse_count(
        env, "ETUDE_FEEDBACK_WINDOW_ROLLOUTS", 1_000, low=2, high=MAX_WINDOW_ROLLOUTS
    )
    fewest = min(100, num_rollouts)
    return WindowRules(
        num_rollouts=num_rollouts,
        min_rollouts=parse_count(
            env, "ETUDE_FEEDBACK_WINDOW_MIN_ROLLOUTS", fewest, low=2, high=num_rollouts
        ),
        max_age_s=parse_count(env, "ETUDE_FEEDBACK_WINDOW_AGE_S", 7_200, low=1, high=_MAX_S),
        horizon_s=parse_count(env, "ETUDE_FEEDBACK_HORIZON_S", 3_600, low=1, high=_MAX_S),
        weights=_parse_rules(env, "ETUDE_FEEDBACK_SIGNALS", parse_weights),
        actions=_parse_rules(env, "ETUDE_FEEDBACK_MONITORS", parse_actions),
        outcome_s=parse_count(env, "ETUDE_FEEDBACK_OUTCOME_S", 0, low=0, high=_MAX_S),
        tenant=env.get("ETUDE_FEEDBACK_WINDOW_TENANT", ""),
    )


def _parse_release(env: Mapping[str, str], horizon_s: float) -> ReleaseSettings | None:
    rules_file = parse_path(env, "ETUDE_FEEDBACK_RELEASE")
    if rules_file is None:
        return None
    return ReleaseSettings(
        rules_file=rules_file,
        host=env.get("ETUDE_HOST", "127.0.0.1"),
        port=parse_port(env, "ETUDE_FEEDBACK_RELEASE_PORT", 7061),
        horizon_s=horizon_s,
        trusts_network=_parse_callers(env) == "Network",
    )


def _parse_callers(env: Mapping[str, str]) -> str:
    callers = env.get("ETUDE_FEEDBACK_RELEASE_CALLERS", "Keys")
    if callers not in {"Keys", "Network"}:
        raise ValueError(f"ETUDE_FEEDBACK_RELEASE_CALLERS must be Keys or Network, got {callers!r}")
    return callers


def _parse_rules(
    env: Mapping[str, str], name: str, parse: Callable[[str], Mapping[str, T]]
) -> Mapping[str, T]:
    try:
        return parse(env.get(name, ""))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
