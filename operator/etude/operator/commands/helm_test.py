"""Check of an installed operator, for `helm test`: kinds served, probe ready, one leader."""

import argparse
import asyncio
import http.client
import sys
import time
from collections.abc import AsyncIterator

from etude.common.errors import EtudeError, Problem
from etude.operator.controller.leader_election import RETRY_S
from etude.operator.kind_registry import KINDS
from etude.operator.kube.interface import ClusterError
from etude.operator.kube.leases import KubernetesLeaseStore, LeaderLease, LeaseStore
from etude.operator.kube.rest import RestClient, parse_read_reply, path_of
from etude.operator.settings import Settings

REASON = "NotInstalled"
TIMEOUT_S = 60.0
"""A new release takes time to start, and an old leader lease to expire."""
PROBE_TIMEOUT_S = 5.0
LOGS = "read the log of the operator's pods"


async def find_problems(
    rest: RestClient, leases: LeaseStore, settings: Settings, probe: tuple[str, int]
) -> AsyncIterator[Problem]:
    """All failed checks, each with a suggested fix."""
    for kind in KINDS:
        for namespace in settings.namespaces or ("",):
            problem = await served_problem(rest, kind.name, namespace)
            if problem is not None:
                yield problem
    for found in (
        await probe_problem(probe, patience_s=TIMEOUT_S),
        await leader_problem(leases, settings.lease, patience_s=TIMEOUT_S),
    ):
        if found is not None:
            yield found


async def served_problem(rest: RestClient, kind: str, namespace: str) -> Problem | None:
    """The problem if objects of a kind cannot be listed with the operator's account."""
    where = f"{kind} in {namespace or 'all namespaces'}"
    try:
        reply = await rest.request("GET", path_of(kind, namespace), query=[("limit", "1")])
        parse_read_reply(reply, f"list {kind}")
    except ClusterError as error:
        fix = "install the chart with crds.enabled=true, and the roles that it renders"
        return Problem(REASON, str(error), where, fix)
    return None


async def leader_problem(leases: LeaseStore, name: str, *, patience_s: float) -> Problem | None:
    """The problem if no replica renews the leader lease in time."""
    deadline_s = time.monotonic() + patience_s
    what = "does not exist"
    before: LeaderLease | None = None
    while time.monotonic() < deadline_s:
        try:
            after = await leases.read()
        except ClusterError as error:
            after, what = None, str(error)
        if after is not None:
            if before is not None and after.holder and after.version != before.version:
                return None
            what = f"is not renewed by {after.holder}" if after.holder else "has no holder"
        before = after
        await asyncio.sleep(RETRY_S)
    return Problem(REASON, what, f"lease {name}", LOGS)


async def probe_problem(probe: tuple[str, int], *, patience_s: float) -> Problem | None:
    """The problem if no ready replica answers in time."""
    deadline_s = time.monotonic() + patience_s
    what = await asyncio.to_thread(_probe_fault, probe)
    while what and time.monotonic() < deadline_s:
        await asyncio.sleep(RETRY_S)
        what = await asyncio.to_thread(_probe_fault, probe)
    return Problem(REASON, what, f"http://{probe[0]}:{probe[1]}/readyz", LOGS) if what else None


def _probe_fault(probe: tuple[str, int]) -> str:
    """The fault of the answer; empty if there is none."""
    connection = http.client.HTTPConnection(*probe, timeout=PROBE_TIMEOUT_S)
    try:
        connection.request("GET", "/readyz")
        status = connection.getresponse().status
    except OSError as error:
        return f"does not answer: {error}"
    finally:
        connection.close()
    return "" if status == http.HTTPStatus.OK else f"answers {status}"


async def check(settings: Settings, probe: tuple[str, int]) -> list[Problem]:
    """All problems of a release.

    Raises:
        UserError: the settings name no API server.
    """
    rest = await RestClient.connect(settings.kubeconfig)
    try:
        leases = KubernetesLeaseStore(rest, settings.namespace, settings.lease)
        return [each async for each in find_problems(rest, leases, settings, probe)]
    finally:
        await rest.close()


def main() -> None:
    """Print the failed checks.

    Raises:
        SystemExit: with 1 if a check failed.
    """
    parser = argparse.ArgumentParser(
        prog="python -m etude.operator.commands.helm_test", description=__doc__
    )
    parser.add_argument("host", help="address of the operator's Service")
    parser.add_argument("port", type=int, help="its probe port")
    options = parser.parse_args()
    try:
        found = asyncio.run(check(Settings.from_env(), (options.host, options.port)))
    except EtudeError as error:
        raise SystemExit(f"{error}") from error
    if found:
        raise SystemExit("\n".join(problem.text() for problem in found))
    kinds = ", ".join(kind.name for kind in KINDS)
    sys.stdout.write(f"{kinds} are served, and an operator leads and answers\n")


if __name__ == "__main__":
    main()
