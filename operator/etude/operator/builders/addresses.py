"""Addresses and ports of roles, brokers and hosts."""

from collections.abc import Mapping

from etude.common.api.kinds import RLRun
from etude.operator import names

PORTS: Mapping[str, Mapping[str, int]] = {
    names.TRAINER: {"grpc": 7000},
    names.INFERENCE: {"grpc": 7010, "http": 7011},
    names.BROKER: {"grpc": 7020},
    names.HOST: {"grpc": 7030},
    names.ENVIRONMENT_API: {"http": 7050},
    names.REWARDS: {"grpc": 7040},
    names.STABLE: {"grpc": 7010},
    names.CANARY: {"grpc": 7010},
    names.GATEWAY: {"http": 7080},
    names.FEEDBACK: {"http": 7090, "grpc": 7091},
}

ISSUER_PORT = 7060
"""Port of the chart's own certificate issuer."""


def role_address(run: RLRun, role: str, ordinal: int = 0) -> str:
    """Address of a role's pod behind the role's headless Service, within the namespace."""
    workload = names.child(run.metadata.name, role)
    return f"{_host_name(run, workload, ordinal)}.{workload}:{PORTS[role]['grpc']}"


def _host_name(run: RLRun, workload: str, ordinal: int) -> str:
    if run.spec.scheduling.kind == "JobSet":
        return f"{workload}-0-{ordinal}"  # the first and only Job of its role
    return names.pod(workload, ordinal)


def broker_service(pool: str) -> str:
    """Address behind which all brokers of a pool are found, however many there are."""
    return f"{names.child(pool, names.BROKER)}:{PORTS[names.BROKER]['grpc']}"


def broker_addresses(pool: str, count: int) -> list[str]:
    """Addresses of a pool's brokers, one by one."""
    workload = names.child(pool, names.BROKER)
    port = PORTS[names.BROKER]["grpc"]
    return [names.address(workload, port, place) for place in range(count)]
