"""Settings of the trainer process, from environment variables."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from etude.common.api.run.spec import RLRunSpec
from etude.common.model_sources.hub_access import HubAccess
from etude.common.pools.broker_shards import brokers_by_environment
from etude.common.settings_fields import parse_count, parse_names, parse_path, parse_port

WORKER_ENV = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}
"""Variables of learner ranks and rollout workers, unless the environment sets others.

Threads that spin for long starve busy cores (2 x the CPU seconds); those that sleep at once wake
too late for small operations. A thousand turns: a step of the demo takes 0.129 s instead of 0.156
on idle cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Environment variables, read once."""

    run_file: Path
    """Resolved run."""
    inference_targets: tuple[str, ...]
    """host:port of each engine; empty for a run that never samples."""
    brokers: Mapping[str, str]
    """By environment of the run: host:port of its pool's broker, or several with commas."""
    rewards_target: str
    """host:port of the reward service; empty for a run that never samples."""
    ray_address: str | None
    """RAY_ADDRESS, as Ray itself has it: the cluster to join; unset starts one on this machine."""
    scratch: Path
    """Private folder."""
    host: str
    port: int
    probe_port: int
    pod: str
    attempt: int
    traces_file: Path | None
    hub: HubAccess = field(default_factory=HubAccess)
    """HF_ENDPOINT and HF_TOKEN, as the hub's own client has them."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Self:
        """Read the settings.

        Raises:
            KeyError: naming a variable that is not set.
            ValueError: naming a variable that cannot be read.
        """
        return cls(
            run_file=Path(env["ETUDE_RUN_FILE"]),
            inference_targets=parse_names(env, "ETUDE_INFERENCE_TARGETS"),
            brokers=brokers_by_environment(env.get("ETUDE_BROKERS", "{}")),
            rewards_target=env.get("ETUDE_REWARDS_TARGET", ""),
            ray_address=env.get("RAY_ADDRESS") or None,
            scratch=Path(env["ETUDE_SCRATCH"]),
            host=env.get("ETUDE_HOST", "127.0.0.1"),
            port=parse_port(env, "ETUDE_PORT", 7000),
            probe_port=parse_port(env, "ETUDE_PROBE_PORT", 8080),
            pod=env.get("ETUDE_POD", "trainer"),
            attempt=parse_count(env, "ETUDE_ATTEMPT", 1, high=1_000_000),
            traces_file=parse_path(env, "ETUDE_TRACES_FILE"),
            hub=HubAccess.from_env(env),
        )

    def check(self, spec: RLRunSpec) -> None:
        """Refuse settings that lack what the run needs.

        Raises:
            ValueError: naming the variable that is missing.
        """
        if not any(phase.is_rl for phase in spec.phases):
            return
        if not self.inference_targets:
            raise ValueError("ETUDE_INFERENCE_TARGETS: the run samples, and no engine is named")
        if not self.rewards_target:
            raise ValueError(
                "ETUDE_REWARDS_TARGET: the run samples, and no reward service is named"
            )
        for role in spec.roles.environments:
            if role.name not in self.brokers:
                raise ValueError(f"ETUDE_BROKERS: has no broker for environment {role.name}")
