"""Identity of a process in its certificate: a SPIFFE URI."""

import re
from dataclasses import dataclass
from typing import Self

OPERATOR = "operator"
TRAINER = "trainer"
INFERENCE = "inference"
REWARDS = "rewards"
BROKER = "broker"
NODE = "node"
EDGE = "edge"
GATEWAY = "gateway"
FEEDBACK = "feedback"
STABLE = "stable"
CANARY = "canary"
EVALUATOR = "evaluator"
"""Drives the rollouts of an EvalRun, whose parts have identities like those of a run."""

DOMAIN = "etude.dev"
"""Default trust domain."""

_LABEL = r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?"
_URI = re.compile(
    rf"spiffe://(?P<domain>{_LABEL})/ns/(?P<namespace>{_LABEL})"
    rf"(/run/(?P<run>{_LABEL}))?(/pool/(?P<pool>{_LABEL}))?(/route/(?P<route>{_LABEL}))?"
    r"(/role/(?P<role>[a-z]+))?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A part of a run, pool or route; without a role, all of its namespace but the operator."""

    domain: str
    namespace: str
    run: str = ""
    """The run it belongs to; also that of a run's own pool."""
    pool: str = ""
    route: str = ""
    role: str = ""

    @classmethod
    def parse(cls, uri: str) -> Self:
        """The identity that a SPIFFE URI names.

        Raises:
            ValueError: it is not one of our URIs.

        Source: https://github.com/spiffe/spiffe/blob/main/standards/SPIFFE-ID.md.
        """
        found = _URI.fullmatch(uri)
        if found is None:
            raise ValueError(
                f"{uri!r} is not spiffe://DOMAIN/ns/NAMESPACE[/run/…][/pool/…][/route/…]/role/…"
            )
        return cls(**{name: text or "" for name, text in found.groupdict().items()})

    @property
    def uri(self) -> str:
        names = ("run", "pool", "route", "role")
        parts = (("ns", self.namespace), *((name, getattr(self, name)) for name in names))
        path = "".join(f"/{key}/{value}" for key, value in parts if value)
        return f"spiffe://{self.domain}{path}"

    @property
    def server_name(self) -> str:
        """DNS name that clients require of its certificate: the name of its Service.

        A certificate for a whole namespace answers to every name in it.
        """
        if not self.role:
            return f"*.{self.namespace}.svc"
        workload = "-".join(
            part for part in (self.pool or self.run or self.route, self.role) if part
        )
        return f"{workload}.{self.namespace}.svc"


def identities(names: list[str]) -> list[Identity]:
    """Ours among the names of a certificate."""
    found = []
    for name in names:
        try:
            found.append(Identity.parse(name))
        except ValueError:
            continue
    return found
