"""Settings of the issuer, from its environment."""

import datetime
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from etude.common.settings_fields import parse_names
from etude.common.tls.identity import DOMAIN, Identity
from etude.operator.issuer.token_review import NodePools


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Environment variables, read once."""

    folder: Path
    """Folder of the CAs and their keys."""
    identity: Identity
    """The issuer's own, named after its Service."""
    operator: str
    """The operator's account, NAMESPACE:NAME."""
    operator_hosts: tuple[str, ...]
    """DNS names of the operator's Service."""
    lifetime: datetime.timedelta
    nodes: NodePools
    """Pools whose hosts are privileged pods of a namespace of their own."""
    host: str
    port: int
    probe_port: int
    kubeconfig: Path | None
    """Used outside a cluster; unset inside one."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Self:
        """Read the settings.

        Raises:
            KeyError: naming a variable that is not set.
            ValueError: a number cannot be read.
        """
        namespace, service = env["ETUDE_NAMESPACE"], env["ETUDE_ISSUER_SERVICE"]
        host = f"{env['ETUDE_OPERATOR_SERVICE']}.{namespace}"
        return cls(
            folder=Path(env["ETUDE_CA_FOLDER"]),
            identity=Identity(
                domain=env.get("ETUDE_TLS_DOMAIN") or DOMAIN,
                namespace=namespace,
                run=service.removesuffix("-issuer"),
                role="issuer",
            ),
            operator=f"{namespace}:{env['ETUDE_OPERATOR_ACCOUNT']}",
            operator_hosts=(host, f"{host}.svc"),
            lifetime=datetime.timedelta(seconds=int(env["ETUDE_TLS_LIFETIME_SECONDS"])),
            nodes=NodePools(
                namespace=env.get("ETUDE_NODES_NAMESPACE", ""),
                pools=frozenset(parse_names(env, "ETUDE_NODE_POOLS")),
            ),
            host=env.get("ETUDE_HOST", "127.0.0.1"),
            port=int(env.get("ETUDE_PORT", "7060")),
            probe_port=int(env.get("ETUDE_PROBE_PORT", "8080")),
            kubeconfig=Path(env["KUBECONFIG"]) if env.get("KUBECONFIG") else None,
        )
