"""Forward proxy of an environment: reads one request of a connection, decides, carries it out.

Each connection carries one request or one tunnel; bytes after that are ignored in both directions.
So there is no second request to smuggle, nor an answer to desync.
"""

import asyncio
import ssl
import time

import h11

from etude.envserver import metrics
from etude.envserver.egress import policy, proxy_request
from etude.envserver.egress.byte_streams import Wire
from etude.envserver.egress.credentials import CredentialError, EchoedError
from etude.envserver.egress.environment_egress import Gate, Trip
from etude.envserver.egress.http_exchange import Exchange, answer
from etude.envserver.egress.limits import SPENT, OverLimitError
from etude.envserver.egress.policy import Decision, Mode, Rule, Verdict
from etude.envserver.egress.proxy_request import Asked, MalformedError
from etude.envserver.egress.tunnels import TunnelRefusedError, tunnel
from etude.envserver.egress.upstream import NotPublicError, Target, UnreachableError

HEAD_S = 20.0
"""For the head of a request, from a client that may have been frozen meanwhile."""
MAX_HEAD_BYTES = 32 << 10

_STATUS = {
    Verdict.MALFORMED: 400,
    Verdict.LIMIT: 429,
    Verdict.UNREACHABLE: 502,
    Verdict.CREDENTIAL: 502,
}


class RefusedError(Exception):
    """A refused attempt."""

    def __init__(self, verdict: Verdict, why: str) -> None:
        super().__init__(why)
        self.verdict = verdict


async def serve(client: Wire, gate: Gate) -> None:
    """Serve a connection to its end, and log it; it is closed then."""
    trip = Trip()
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
    metrics.egress_connections.inc()
    try:
        await _serve(client, connection, gate, trip)
    except RefusedError as refusal:
        trip.verdict, trip.why = refusal.verdict, str(refusal)
        status = _STATUS.get(refusal.verdict, 403)
        await _refuse(client, connection, status, f"{refusal.verdict.value}: {refusal}")
    except h11.ProtocolError as error:
        # Its text quotes the line, in which a server may have sent a credential back.
        trip.why = f"not HTTP: {type(error).__name__}"
    except (OSError, TimeoutError) as error:
        # One side has closed the connection.
        trip.why = str(error) or type(error).__name__
    finally:
        metrics.egress_connections.dec()
        gate.enter(trip)
        await client.close()


async def _serve(client: Wire, connection: h11.Connection, gate: Gate, trip: Trip) -> None:
    await asyncio.sleep(gate.account.wait_s(time.monotonic()))
    request = await _head(client, connection)
    wanted = _asked(request, trip)
    if gate.account.is_spent:
        raise RefusedError(Verdict.LIMIT, SPENT)
    decision = policy.decide(gate.rules, wanted.attempt)
    rule = _allowed(decision, wanted, trip)
    if not gate.account.may_name(decision.host):
        raise RefusedError(Verdict.LIMIT, "too many different hosts")
    secret = _secret(gate, rule)
    server = await _connected(gate, Target(decision.host, rule.port, rule.mode is Mode.HTTPS))
    trip.verdict = Verdict.ALLOWED
    try:
        if wanted.attempt.is_tunnel:
            await tunnel(client, connection, server, decision.host, gate, trip)
        else:
            host = decision.host if rule.port in {80, 443} else f"{decision.host}:{rule.port}"
            exchange = Exchange(client, connection, server, gate, trip, rule.is_limited)
            await exchange.run(request, wanted.target, host, secret)
    except TunnelRefusedError as refusal:
        # The client was told that the tunnel is open: no answer is possible.
        trip.verdict, trip.why = Verdict.NOT_TLS, str(refusal)
    except OverLimitError as error:
        raise RefusedError(Verdict.LIMIT, str(error)) from error
    except EchoedError as error:
        raise RefusedError(Verdict.CREDENTIAL, str(error)) from error
    finally:
        await server.close()


async def _head(client: Wire, connection: h11.Connection) -> h11.Request:
    async with asyncio.timeout(HEAD_S):
        while True:
            try:
                event = connection.next_event()
            except h11.RemoteProtocolError as error:
                raise RefusedError(Verdict.MALFORMED, str(error)) from error
            if isinstance(event, h11.Request):
                return event
            if event is not h11.NEED_DATA:
                raise ConnectionResetError("the client sent no request")
            connection.receive_data(await client.read())


def _asked(request: h11.Request, trip: Trip) -> Asked:
    trip.method = request.method.decode("ascii", "replace")
    trip.host = request.target.decode("ascii", "replace")
    try:
        wanted = proxy_request.asked(request)
    except MalformedError as error:
        raise RefusedError(Verdict.MALFORMED, str(error)) from error
    trip.host, trip.port = wanted.attempt.host, wanted.attempt.port
    return wanted


def _allowed(decision: Decision, wanted: Asked, trip: Trip) -> Rule:
    trip.host = decision.host or wanted.attempt.host
    trip.rule = decision.rule.name if decision.rule is not None else ""
    if decision.verdict is Verdict.ALLOWED and decision.rule is not None:
        return decision.rule
    whats = {
        Verdict.NOT_LISTED: "this pool does not list it",
        Verdict.ADDRESS: "only names of public hosts are reached from here",
        Verdict.WRONG_MODE: _mode(decision.rule),
        Verdict.METHOD: f"this pool lists it without {wanted.attempt.method}",
        Verdict.PATH: "this pool lists other paths of it",
    }
    what = whats.get(decision.verdict, "")
    raise RefusedError(decision.verdict, f"{trip.host} port {trip.port}: {what}")


def _mode(rule: Rule | None) -> str:
    if rule is not None and rule.mode is Mode.TUNNEL:
        return "it is reached by https:// only"
    return "it is reached by http:// only; the proxy itself speaks TLS where its rule says so"


def _secret(gate: Gate, rule: Rule) -> tuple[bytes, bytes] | None:
    if rule.credential is None:
        return None
    try:
        value = gate.secrets.value(rule.credential)
    except CredentialError as error:
        raise RefusedError(Verdict.CREDENTIAL, str(error)) from error
    return rule.credential.header.lower().encode("ascii"), value


async def _connected(gate: Gate, target: Target) -> Wire:
    try:
        return await gate.upstream.connect(target, gate.lookups)
    except NotPublicError as error:
        raise RefusedError(Verdict.ADDRESS, str(error)) from error
    except UnreachableError as error:
        raise RefusedError(Verdict.UNREACHABLE, str(error)) from error


async def _refuse(client: Wire, connection: h11.Connection, status: int, why: str) -> None:
    """Answer the client with the refusal, if its state allows an answer."""
    if connection.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:
        return
    try:
        async with asyncio.timeout(HEAD_S):
            await answer(client, connection, status, f"etude refuses: {why}\n".encode())
    except (OSError, TimeoutError, h11.LocalProtocolError, ssl.SSLError):
        return
