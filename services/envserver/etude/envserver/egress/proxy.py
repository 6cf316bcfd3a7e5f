"""Forward proxy of an environment: reads one request of a connection, decides, carries it out.

Each connection carries one request or one tunnel; bytes after that are ignored in both directions.
So there is no second request to smuggle, nor an answer to desync.
"""

import asyncio
import ssl
import time
from asyncio import CancelledError
from typing import NamedTuple

import h11

from etude.common.api.pool.network import EgressMode
from etude.envserver import metrics
from etude.envserver.egress import policy, proxy_request
from etude.envserver.egress.byte_streams import ByteStream
from etude.envserver.egress.credentials import CredentialEchoError, CredentialError
from etude.envserver.egress.environment_egress import EgressAttempt, EnvironmentEgress
from etude.envserver.egress.http_exchange import HttpExchange, send_answer
from etude.envserver.egress.limits import SPENT, OverLimitError
from etude.envserver.egress.policy import AllowRule, EgressDecision, EgressVerdict
from etude.envserver.egress.proxy_request import MalformedError, ProxyRequest
from etude.envserver.egress.tunnels import TunnelRefusedError, run_tunnel
from etude.envserver.egress.upstream import NotPublicError, UnreachableError, UpstreamTarget

HEAD_S = 20.0
"""For the head of a request, from a client that may have been frozen meanwhile."""
MAX_HEAD_BYTES = 32 << 10

_STATUS = {
    EgressVerdict.MALFORMED: 400,
    EgressVerdict.LIMIT: 429,
    EgressVerdict.UNREACHABLE: 502,
    EgressVerdict.CREDENTIAL: 502,
}


class EgressRefusedError(Exception):
    """A refused attempt."""

    def __init__(self, verdict: EgressVerdict, why: str) -> None:
        super().__init__(why)
        self.verdict = verdict


async def serve_connection(client: ByteStream, egress: EnvironmentEgress) -> None:
    """Serve a connection to its end, and log it; it is closed then.

    Raises:
        CancelledError: it was cut.
    """
    attempt = EgressAttempt()
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
    metrics.egress_connections.inc()
    try:
        await _serve(client, connection, egress, attempt)
    except EgressRefusedError as refusal:
        attempt.verdict, attempt.why = refusal.verdict, str(refusal)
        status = _STATUS.get(refusal.verdict, 403)
        await _refuse(client, connection, status, f"{refusal.verdict.value}: {refusal}")
    except h11.ProtocolError as error:
        # Its text quotes the line, in which a server may have sent a credential back.
        attempt.why = f"not HTTP: {type(error).__name__}"
    except CancelledError:
        attempt.why = "cut: its rule was revoked, or the environment ended"
        raise
    except (OSError, TimeoutError) as error:
        # One side has closed the connection.
        attempt.why = str(error) or type(error).__name__
    finally:
        metrics.egress_connections.dec()
        egress.log_attempt(attempt)
        await client.close()


async def _serve(
    client: ByteStream,
    connection: h11.Connection,
    egress: EnvironmentEgress,
    attempt: EgressAttempt,
) -> None:
    await asyncio.sleep(egress.account.wait_s(time.monotonic()))
    request = await _head(client, connection)
    wanted = _parse_request(request, attempt)
    if egress.account.is_spent:
        raise EgressRefusedError(EgressVerdict.LIMIT, SPENT)
    decision = policy.decide(egress.rules, wanted.attempt)
    rule = _allowed(decision, wanted, attempt)
    with egress.using(rule):
        await _carry_out(
            client, connection, egress, attempt, _Allowed(request, wanted, rule, decision.host)
        )


class _Allowed(NamedTuple):
    """A request that a rule allows."""

    request: h11.Request
    wanted: ProxyRequest
    rule: AllowRule
    host: str
    """Canonical."""


async def _carry_out(
    client: ByteStream,
    connection: h11.Connection,
    egress: EnvironmentEgress,
    attempt: EgressAttempt,
    allowed: _Allowed,
) -> None:
    request, wanted, rule, name = allowed
    if not egress.account.may_name(name):
        raise EgressRefusedError(EgressVerdict.LIMIT, "too many different hosts")
    secret = _secret(egress, rule)
    server = await _connect(egress, UpstreamTarget(name, rule.port, rule.mode is EgressMode.HTTPS))
    attempt.verdict = EgressVerdict.ALLOWED
    try:
        if wanted.attempt.is_tunnel:
            await run_tunnel(client, connection, server, name, egress, attempt)
        else:
            host = name if rule.port in {80, 443} else f"{name}:{rule.port}"
            exchange = HttpExchange(client, connection, server, egress, attempt, rule.is_limited)
            await exchange.run(request, wanted.target, host, secret)
    except TunnelRefusedError as refusal:
        # The client was told that the tunnel is open: no answer is possible.
        attempt.verdict, attempt.why = EgressVerdict.NOT_TLS, str(refusal)
    except OverLimitError as error:
        raise EgressRefusedError(EgressVerdict.LIMIT, str(error)) from error
    except CredentialEchoError as error:
        raise EgressRefusedError(EgressVerdict.CREDENTIAL, str(error)) from error
    finally:
        await server.close()


async def _head(client: ByteStream, connection: h11.Connection) -> h11.Request:
    async with asyncio.timeout(HEAD_S):
        while True:
            try:
                event = connection.next_event()
            except h11.RemoteProtocolError as error:
                raise EgressRefusedError(EgressVerdict.MALFORMED, str(error)) from error
            if isinstance(event, h11.Request):
                return event
            if event is not h11.NEED_DATA:
                raise ConnectionResetError("the client sent no request")
            connection.receive_data(await client.read())


def _parse_request(request: h11.Request, attempt: EgressAttempt) -> ProxyRequest:
    attempt.method = request.method.decode("ascii", "replace")
    attempt.host = request.target.decode("ascii", "replace")
    try:
        wanted = proxy_request.parse_request(request)
    except MalformedError as error:
        raise EgressRefusedError(EgressVerdict.MALFORMED, str(error)) from error
    attempt.host, attempt.port = wanted.attempt.host, wanted.attempt.port
    return wanted


def _allowed(decision: EgressDecision, wanted: ProxyRequest, attempt: EgressAttempt) -> AllowRule:
    attempt.host = decision.host or wanted.attempt.host
    attempt.rule = decision.rule.name if decision.rule is not None else ""
    if decision.verdict is EgressVerdict.ALLOWED and decision.rule is not None:
        return decision.rule
    whats = {
        EgressVerdict.NOT_LISTED: "this pool does not list it",
        EgressVerdict.ADDRESS: "only names of public hosts are reached from here",
        EgressVerdict.WRONG_MODE: _mode(decision.rule),
        EgressVerdict.METHOD: f"this pool lists it without {wanted.attempt.method}",
        EgressVerdict.PATH: "this pool lists other paths of it",
    }
    what = whats.get(decision.verdict, "")
    raise EgressRefusedError(decision.verdict, f"{attempt.host} port {attempt.port}: {what}")


def _mode(rule: AllowRule | None) -> str:
    if rule is not None and rule.mode is EgressMode.TUNNEL:
        return "it is reached by https:// only"
    return "it is reached by http:// only; the proxy itself speaks TLS where its rule says so"


def _secret(egress: EnvironmentEgress, rule: AllowRule) -> tuple[bytes, bytes] | None:
    if rule.credential is None:
        return None
    try:
        value = egress.secrets.value(rule.credential)
    except CredentialError as error:
        raise EgressRefusedError(EgressVerdict.CREDENTIAL, str(error)) from error
    return rule.credential.header.lower().encode("ascii"), value


async def _connect(egress: EnvironmentEgress, target: UpstreamTarget) -> ByteStream:
    try:
        return await egress.upstream.connect(target, egress.lookups)
    except NotPublicError as error:
        raise EgressRefusedError(EgressVerdict.ADDRESS, str(error)) from error
    except UnreachableError as error:
        raise EgressRefusedError(EgressVerdict.UNREACHABLE, str(error)) from error


async def _refuse(client: ByteStream, connection: h11.Connection, status: int, why: str) -> None:
    """Answer the client with the refusal, if its state allows an answer."""
    if connection.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:
        return
    try:
        async with asyncio.timeout(HEAD_S):
            await send_answer(client, connection, status, f"etude refuses: {why}\n".encode())
    except (OSError, TimeoutError, h11.LocalProtocolError, ssl.SSLError):
        return
