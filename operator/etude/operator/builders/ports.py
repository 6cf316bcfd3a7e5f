"""Ports of the services."""

from collections.abc import Mapping

from etude.operator import names

PORTS: Mapping[str, Mapping[str, int]] = {
    names.TRAINER: {"grpc": 7000},
    names.INFERENCE: {"grpc": 7010, "http": 7011},
    names.BROKER: {"grpc": 7020},
    names.NODE: {"grpc": 7030},
    names.EDGE: {"http": 7050},
    names.REWARDS: {"grpc": 7040},
}

ISSUER_PORT = 7060
"""Port of the chart's own certificate issuer."""
