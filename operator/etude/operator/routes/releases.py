"""State of a route's releases, as its feedback service tells it, for the status."""

from collections.abc import Collection, Mapping

from etude.common.api.kinds import Checkpoint
from etude.common.api.route.status import (
    LastDecision,
    PolicyRouteStatus,
    ServedChannel,
    TestedCandidate,
)
from etude.common.experiments.assignment import BUCKETS
from etude.operator.clock import rfc3339
from etude.operator.remotes.sanitize import MAX_UNIX_MS
from etude.operator.routes.candidates import find_checkpoint
from etude.v1 import release_pb2

MAX_NAME, MAX_SENTENCE = 253, 1_024
"""Limits of the schema; what a service tells comes from an image of the user's choice."""
POLICIES = {"Automatic", "Manual", "Frozen"}


def release_figures(
    before: PolicyRouteStatus,
    report: release_pb2.GetReleaseStatusResponse | None,
    engines: Mapping[str, str],
    checkpoints: Collection[Checkpoint] = (),
) -> dict[str, object]:
    """Fields of the status about releases; without a report, the last ones stay.

    Args:
        before: the status so far.
        report: newest one of the feedback service.
        engines: counts of ready engines, by channel.
        checkpoints: of the run, for versions that were promoted without naming theirs.
    """
    channels = {
        "stable": before.stable or ServedChannel(),
        "canary": before.canary or ServedChannel(),
    }
    found: dict[str, object] = {}
    if report is not None:
        decided_ms = report.decisions[0].decided_unix_ms if report.decisions else 0
        tested, started_ms = report.canary.candidate, report.canary.started_unix_ms
        channels["stable"] = _channel(channels["stable"], report.stable, decided_ms, checkpoints)
        channels["canary"] = _channel(channels["canary"], tested, started_ms, checkpoints)
        found = {
            "test": _test(report.canary) if report.HasField("canary") else None,
            "policy": report.policy if report.policy in POLICIES else "",
            "freeze": report.freeze[:MAX_SENTENCE],
            "decision": _decision(report.decisions[0]) if report.decisions else None,
        }
    return found | {
        name: each.model_copy(update={"engines": engines[name]}) if name in engines else None
        for name, each in channels.items()
    }


def _channel(
    before: ServedChannel,
    served: release_pb2.ServedPolicyVersion,
    since_ms: int,
    checkpoints: Collection[Checkpoint],
) -> ServedChannel:
    """A channel with its version; the time stays while the version does."""
    if not served.HasField("version"):
        return ServedChannel()
    version = f"{served.version.epoch}.{served.version.number}"
    is_same = version == before.version and before.since is not None
    found = None if served.checkpoint else find_checkpoint(checkpoints, served)
    name = served.checkpoint if found is None else found.metadata.name
    return ServedChannel(
        version=version,
        checkpoint=name[:MAX_NAME],
        since=before.since if is_same else _time(since_ms),
    )


def _test(canary: release_pb2.CanaryStatus) -> TestedCandidate:
    share = min(max(0, canary.share), BUCKETS)
    return TestedCandidate(
        experiment=canary.experiment[:MAX_NAME],
        share=f"{100 * share / BUCKETS:g} %",
        question=canary.question[:MAX_SENTENCE],
    )


def _decision(newest: release_pb2.ReleaseDecision) -> LastDecision:
    return LastDecision(
        action=newest.action[:MAX_NAME],
        sentence=newest.sentence[:MAX_SENTENCE],
        time=_time(newest.decided_unix_ms),
    )


def _time(unix_ms: int) -> str | None:
    return rfc3339(min(unix_ms, MAX_UNIX_MS) / 1000) if unix_ms > 0 else None
