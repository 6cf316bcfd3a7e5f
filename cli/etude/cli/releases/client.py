"""Client of the service that decides about a route's releases."""

import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import grpc
from google.protobuf.json_format import MessageToDict

from etude.common.api.evaluation.status import EvaluationResult
from etude.common.api.kinds import Checkpoint, EvalRun
from etude.common.errors import InvalidFieldError, Problem, UserError
from etude.common.release.proposal import build_proposal
from etude.common.rpc import channels
from etude.common.weights import VersionId
from etude.v1 import release_pb2, release_pb2_grpc

if TYPE_CHECKING:
    from etude.v1.release_pb2_grpc import ReleaseServiceAsyncStub

_REASONS = {
    grpc.StatusCode.UNAVAILABLE: (
        "Unreachable",
        "check that the feedback service runs, and --at; it may have decided: give --request-id",
    ),
    grpc.StatusCode.DEADLINE_EXCEEDED: ("Unreachable", "look at etude release status"),
    grpc.StatusCode.UNAUTHENTICATED: ("Forbidden", "give --key-file with a key of scope admin"),
    grpc.StatusCode.PERMISSION_DENIED: ("Forbidden", "use a key of scope admin"),
    grpc.StatusCode.ALREADY_EXISTS: ("Conflict", "take another --request-id"),
    grpc.StatusCode.FAILED_PRECONDITION: ("Conflict", "ask again: another service took over"),
    grpc.StatusCode.INVALID_ARGUMENT: ("InvalidArgument", "correct the field that it names"),
}

DEADLINE_S = 30.0
"""Of an answer, which is in the store by then."""


class DecisionText(NamedTuple):
    """Answer of the service to a request."""

    action: str
    sentence: str


def read_key(path: Path | None) -> str:
    """Read an API key from a file; empty without one.

    Raises:
        UserError: the file cannot be read.
    """
    if path is None:
        return ""
    try:
        return path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        fix = "write the key that etude-feedback key USER admin printed into it"
        raise UserError(Problem("NotFound", str(error), str(path), fix)) from error


class Evaluated(NamedTuple):
    """A checkpoint of a run on this machine, with the result of its evaluation."""

    uid: str
    """Of the EvalRun."""
    run_uid: str
    checkpoint: str
    result: EvaluationResult


def read_evaluation(folder: Path, name: str) -> Evaluated:
    """Read the result of an EvalRun from a run's folder.

    Raises:
        UserError: there is none, or it is not finished.
    """
    fix = "run etude eval with its manifest first"
    try:
        objects = json.loads((folder / "objects.json").read_bytes())
        found = {(each["kind"], each["metadata"]["name"]): each for each in objects}
        evaluation = EvalRun.parse_known_fields(found["EvalRun", name])
        checkpoint_name = found["EvalRun", name]["spec"]["checkpointRef"]["name"]
        checkpoint = Checkpoint.parse_known_fields(found["Checkpoint", checkpoint_name])
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = "is no EvalRun of this run whose checkpoint is there"
        raise UserError(Problem("NotFound", what, f"{name} in {folder}", fix)) from error
    run = checkpoint.spec.run_ref
    if not evaluation.status.policy or run is None or run.uid is None:
        what = f"is {evaluation.status.phase or 'Pending'}, not Complete"
        raise UserError(Problem("NotReady", what, f"EvalRun {name}", fix))
    return Evaluated(evaluation.metadata.uid, run.uid, checkpoint_name, evaluation.status)


@dataclass(frozen=True, slots=True)
class ReleaseClient:
    """Asks one service. Every method raises UserError where it is refused."""

    address: str
    key: str

    async def propose(self, found: Evaluated, reason: str, request_id: str) -> DecisionText:
        """Propose an evaluated checkpoint; the same evaluation is answered once.

        Raises:
            UserError: its result has no comparison.
        """
        stable = (await self.read_status()).stable
        try:
            request = build_proposal(
                found.result, stable, run_uid=found.run_uid, checkpoint=found.checkpoint
            )
        except InvalidFieldError as error:
            fix = "evaluate it with a comparison whose baselineRef is of the version in use"
            where = f"result of {found.checkpoint}"
            raise UserError(Problem("InvalidArgument", str(error), where, fix)) from error
        request.caller.CopyFrom(_caller(reason, request_id or f"propose-{found.uid}"))
        async with self._stub() as stub:
            return _text(
                (await stub.Propose(request, metadata=self._metadata, timeout=DEADLINE_S)).decision
            )

    async def promote(
        self, version: str, reason: str, request_id: str, *, without_gate: bool
    ) -> DecisionText:
        """Promote a version; empty for the candidate."""
        request = release_pb2.PromoteRequest(
            caller=_caller(reason, request_id),
            version=await self._find_version(version),
            without_gate=without_gate,
        )
        async with self._stub() as stub:
            return _text(
                (await stub.Promote(request, metadata=self._metadata, timeout=DEADLINE_S)).decision
            )

    async def roll_back(self, version: str, reason: str, request_id: str) -> DecisionText:
        """Roll a version back; empty for the candidate or the version in use."""
        request = release_pb2.RollBackRequest(
            caller=_caller(reason, request_id), version=await self._find_version(version)
        )
        async with self._stub() as stub:
            return _text(
                (await stub.RollBack(request, metadata=self._metadata, timeout=DEADLINE_S)).decision
            )

    async def freeze(self, reason: str, request_id: str) -> DecisionText:
        """Allow roll-backs alone."""
        request = release_pb2.FreezeRequest(caller=_caller(reason, request_id))
        async with self._stub() as stub:
            return _text(
                (await stub.Freeze(request, metadata=self._metadata, timeout=DEADLINE_S)).decision
            )

    async def unfreeze(self, reason: str, request_id: str) -> DecisionText:
        """End a freeze."""
        request = release_pb2.UnfreezeRequest(caller=_caller(reason, request_id))
        async with self._stub() as stub:
            return _text(
                (await stub.Unfreeze(request, metadata=self._metadata, timeout=DEADLINE_S)).decision
            )

    async def read_status(self) -> release_pb2.GetReleaseStatusResponse:
        """Read the state of the releases."""
        request = release_pb2.GetReleaseStatusRequest()
        async with self._stub() as stub:
            return await stub.GetReleaseStatus(request, metadata=self._metadata, timeout=DEADLINE_S)

    async def _find_version(self, text: str) -> release_pb2.ServedPolicyVersion | None:
        """The version that a user wrote.

        Raises:
            UserError: it is none, or lacks its run and is neither in use nor tested.
        """
        if not text:
            return None
        run_uid, _, number = text.rpartition("@")
        try:
            version = VersionId.parse(number).to_proto()
        except ValueError as error:
            fix = "write RUN_UID@EPOCH.NUMBER, such as 4f0c@1.40"
            raise UserError(Problem("InvalidArgument", str(error), text, fix)) from error
        if run_uid:
            return release_pb2.ServedPolicyVersion(run_uid=run_uid, version=version)
        found = await self.read_status()
        for known in (found.canary.candidate, found.stable, found.previous):
            if known.run_uid and known.version == version:
                return known
        fix = "write its run too: RUN_UID@EPOCH.NUMBER"
        raise UserError(Problem("NotFound", "is neither in use nor tested", text, fix))

    @contextlib.asynccontextmanager
    async def _stub(self) -> AsyncIterator["ReleaseServiceAsyncStub"]:
        async with channels.dial(self.address) as channel:
            with _problems(self.address):
                yield release_pb2_grpc.ReleaseServiceStub(channel)

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.key}"),) if self.key else ()


def describe(found: release_pb2.GetReleaseStatusResponse) -> Iterator[str]:
    """Lines for people about a route's releases."""
    policy = f"{found.policy}, {found.freeze}" if found.freeze else found.policy
    yield f"policy   {policy}"
    yield f"stable   {_name(found.stable)}   previous {_name(found.previous)}"
    canary = found.canary
    if found.HasField("canary"):
        since = _time(canary.started_unix_ms)
        share = f"{canary.share / 100:g} % of users since {since}, as many are the control"
        yield f"canary   {_name(canary.candidate)}   {share}   experiment {canary.experiment}"
        if canary.question:
            yield f"waits    for etude promote or etude rollback: {canary.question}"
    else:
        yield "canary   none"
    for decision in found.decisions:
        yield f"{_time(decision.decided_unix_ms)}  {decision.action:<11}  {decision.sentence}"


def to_json(found: release_pb2.GetReleaseStatusResponse) -> dict[str, object]:
    """The same for programs."""
    content: dict[str, object] = MessageToDict(found, always_print_fields_with_no_presence=True)
    return content


@contextlib.contextmanager
def _problems(address: str) -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        unknown = ("Internal", "look into the log of the feedback service")
        reason, fix = _REASONS.get(error.code(), unknown)
        what = error.details() or error.code().name
        where = f"feedback service {address}"
        raise UserError(Problem(reason, what, where, fix)) from error


def _caller(reason: str, request_id: str) -> release_pb2.ReleaseCaller:
    return release_pb2.ReleaseCaller(request_id=request_id or uuid.uuid4().hex, reason=reason)


def _text(decision: release_pb2.ReleaseDecision) -> DecisionText:
    return DecisionText(decision.action, decision.sentence)


def _name(served: release_pb2.ServedPolicyVersion) -> str:
    if not served.run_uid:
        return "none"
    name = f"{served.run_uid}@{VersionId.from_proto(served.version)}"
    return f"{name} ({served.checkpoint})" if served.checkpoint else name


def _time(unix_ms: int) -> str:
    return f"{datetime.fromtimestamp(unix_ms / 1_000, UTC):%Y-%m-%d %H:%M:%SZ}"
