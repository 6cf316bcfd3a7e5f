"""Settings of the gateway from its environment, and the route that it serves."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, ValidationError, model_validator

from etude.common.api.meta import Model, Uri
from etude.common.api.route.spec import EngineLending
from etude.common.api.storage import Storage, StoreAccess
from etude.common.errors import Problem, UserError
from etude.common.release.channels import ChannelExperiment
from etude.common.settings_fields import parse_count, parse_path, parse_port

Targets = Annotated[tuple[str, ...], Field(min_length=1, max_length=1024)]


class Route(Model):
    """A served policy: its model, its engines, and the place of its records."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    """Name that clients give."""
    model_uri: Uri
    """Folder or prefix with the model's tokenizer and chat template."""
    model_access: StoreAccess = StoreAccess()
    """Access to it, where it is a prefix in a bucket."""
    stable: Targets
    """Engines of the stable channel, each host:port."""
    canary: tuple[str, ...] = ()
    """Engines of the canary channel."""
    experiment: ChannelExperiment | None = None
    """Comparison of the two channels."""
    channels: Storage | None = None
    """Store of the run with the records of its channels; they decide the comparison."""
    storage: Storage | None = None
    """Store of the turns of users who consent; nothing is recorded without it."""
    feedback: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Feedback service, host:port of its gRPC: it gives the keys under which records are sealed."""
    lending: EngineLending | None = None
    """Rules by which engines of the stable channel are lent to the run's rollouts."""
    record_unencrypted: bool = False
    """True records without `feedback`: users' text as tokens that no erasure reaches."""

    @model_validator(mode="after")
    def _check_recording(self) -> Self:
        """Refuse to keep users' text in the clear unless that was asked for.

        Raises:
            ValueError: it was not.
        """
        if self.record_unencrypted and self.feedback is not None:
            raise ValueError("recordUnencrypted: records are sealed by `feedback`; leave one out")
        if self.storage is not None and not (self.feedback or self.record_unencrypted):
            raise ValueError(
                "storage: turns would be kept unencrypted, and no erasure reaches them; name the"
                " feedback service that gives keys (feedback: HOST:PORT), or accept that with"
                " recordUnencrypted: true"
            )
        return self

    @model_validator(mode="after")
    def _check_experiment(self) -> Self:
        """Refuse a comparison of the stable channel with itself, and a second one.

        Raises:
            ValueError: users would have a canary that has no engines, or two comparisons.
        """
        if self.experiment is not None and self.channels is not None:
            raise ValueError("experiment: the records of `channels` decide it; leave one out")
        if self.experiment is not None and self.experiment.share > 0 and not self.canary:
            raise ValueError("experiment.share: is above 0, and canary names no engines")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Environment variables, read once."""

    route_file: Path
    """JSON of a route."""
    keys_file: Path
    """API keys, one `user scopes digest` a line."""
    scratch: Path
    """Private folder for a model that comes from an object store."""
    host: str
    port: int
    probe_port: int
    tls_folder: Path | None
    """Folder with tls.crt and tls.key; plain HTTP without it."""
    processes: int
    """Processes that share the port and the quotas."""
    max_body_mib: int
    max_session_tokens: int
    """Of the turns that can be continued; each counts all tokens before its end."""
    max_waiting_mib: int
    """Records that wait for the store; further turns are served and not recorded."""
    outage_s: int
    """A turn fails once no engine has sampled anything for so long."""
    turn_s: int
    """A call to an engine is ended after so long."""
    traces_file: Path | None

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Self:
        """Read the settings.

        Raises:
            KeyError: names a variable that is not set.
            ValueError: names a variable that is invalid.
        """
        return cls(
            route_file=Path(env["ETUDE_GATEWAY_ROUTE"]),
            keys_file=Path(env["ETUDE_GATEWAY_KEYS"]),
            scratch=Path(env["ETUDE_SCRATCH"]),
            host=env.get("ETUDE_HOST", "127.0.0.1"),
            port=parse_port(env, "ETUDE_PORT", 7060),
            probe_port=parse_port(env, "ETUDE_PROBE_PORT", 8080),
            tls_folder=parse_path(env, "ETUDE_GATEWAY_TLS"),
            processes=parse_count(env, "ETUDE_GATEWAY_PROCESSES", 1, low=1, high=256),
            max_body_mib=parse_count(env, "ETUDE_GATEWAY_BODY_MIB", 8, low=1, high=64),
            max_session_tokens=parse_count(
                env, "ETUDE_GATEWAY_SESSION_TOKENS", 8_000_000, low=1, high=1_000_000_000
            ),
            max_waiting_mib=parse_count(env, "ETUDE_GATEWAY_WAITING_MIB", 64, high=4096),
            outage_s=parse_count(env, "ETUDE_GATEWAY_OUTAGE_S", 30, low=1, high=3600),
            turn_s=parse_count(env, "ETUDE_GATEWAY_TURN_S", 1800, low=1, high=86_400),
            traces_file=parse_path(env, "ETUDE_TRACES_FILE"),
        )


def read_route(path: Path) -> Route:
    """Read the route of a file.

    Raises:
        UserError: the file is missing or is no valid route.
    """
    try:
        return Route.parse_known_fields(json.loads(path.read_bytes()))
    except (OSError, ValueError, ValidationError) as cause:
        raise UserError(
            Problem(
                reason="InvalidSpec",
                what=f"cannot be read as a route: {cause}",
                where=str(path),
                fix='give at least {"model": NAME, "modelUri": URI, "stable": ["HOST:PORT"]}',
            )
        ) from cause
