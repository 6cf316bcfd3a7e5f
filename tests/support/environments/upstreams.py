"""Real servers on this machine where the public network would be: HTTP, and TLS of a test CA."""

import asyncio
import contextlib
import datetime
import ipaddress
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import h11
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from tests.support.environments.scripted_network import FixedResolver, RedirectingConnector

from etude.common.api.pool.network import Network
from etude.envserver.egress.credentials import SecretFiles
from etude.envserver.egress.environment_egress import PoolEgress
from etude.envserver.egress.upstream import SocketConnector, Upstream

SHOP, FILES, EVIL = "93.184.215.14", "151.101.1.63", "203.0.114.9"
"""Public addresses; nothing is ever sent to them."""
NAMES: Mapping[str, Sequence[Sequence[str]]] = {
    "shop.example.com": [[SHOP]],
    "api.example.com": [[SHOP]],
    "files.example.org": [[FILES]],
    "evil.example.net": [[EVIL]],
    "metadata.example.com": [["169.254.169.254"]],
    "inside.example.com": [["10.96.0.1"]],
    "mixed.example.com": [[SHOP, "127.0.0.1"]],
    "rebinding.example.com": [[SHOP], ["127.0.0.1"]],
}
SECRET = "Bearer tokens-that-nobody-in-there-may-see"


class Seen(NamedTuple):
    """A request that a server got."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes
    is_tls: bool


@dataclass(slots=True)
class World:
    """Names, servers, and what they saw."""

    folder: Path
    http_port: int = 0
    https_port: int = 0
    num_opened: int = 0
    """Connections that servers got, with a request or not."""
    seen: list[Seen] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    """What servers have beside their own pages, by path; a folder's is its index."""
    names: FixedResolver = field(default_factory=lambda: FixedResolver(NAMES))

    @property
    def ca(self) -> Path:
        """Whom clients have to believe."""
        return self.folder / "ca.pem"

    @property
    def upstream(self) -> Upstream:
        """The public network as it is here."""
        context = ssl.create_default_context(cafile=str(self.ca))
        ports = {
            (address, port): self.http_port if port in {80, 8080} else self.https_port
            for address in (SHOP, FILES, EVIL)
            for port in (80, 8080, 443)
        }
        return Upstream(self.names, RedirectingConnector(ports, SocketConnector(context)))

    def egress(
        self, network: Mapping[str, object], **templates: Sequence[str] | None
    ) -> PoolEgress:
        """A pool's, whose environments are of the template t unless others are named."""
        secrets = self.folder / "secrets"
        (secrets / "shop").mkdir(parents=True, exist_ok=True)
        (secrets / "shop" / "value").write_text(f"{SECRET}\n")
        spec = Network.model_validate(network)
        return PoolEgress(spec, templates or {"t": None}, self.upstream, SecretFiles(secrets))


@contextlib.asynccontextmanager
async def world(folder: Path) -> AsyncIterator[World]:
    """Servers that run while the block does."""
    made = World(folder)
    context = _certified(folder)

    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _serve(made, reader, writer, is_tls=False)

    async def secured(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _serve(made, reader, writer, is_tls=True)

    http = await asyncio.start_server(plain, "127.0.0.1")
    https = await asyncio.start_server(secured, "127.0.0.1", ssl=context)
    made.http_port = http.sockets[0].getsockname()[1]
    made.https_port = https.sockets[0].getsockname()[1]
    async with http, https:
        yield made


async def _serve(
    made: World, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_tls: bool
) -> None:
    connection = h11.Connection(h11.SERVER)
    request, body = None, b""
    made.num_opened += 1
    with contextlib.suppress(OSError, h11.ProtocolError, ssl.SSLError):
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(65536))
            elif isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            else:
                break
        if request is not None:
            headers = {name.decode(): value.decode() for name, value in request.headers}
            seen = Seen(request.method.decode(), request.target.decode(), headers, body, is_tls)
            made.seen.append(seen)
            await _answer(made, connection, writer, seen)
    writer.close()


async def _answer(
    made: World, connection: h11.Connection, writer: asyncio.StreamWriter, seen: Seen
) -> None:
    path, _, query = seen.target.partition("?")
    headers = [("x-server", "test"), *_headers(path, query, seen)]
    body = made.files[path] if path in made.files else _body(path, query, seen)
    if path.endswith("/"):
        headers.append(("content-type", "text/html"))
    if path != "/chunked":
        headers.append(("content-length", str(len(body))))
    status = 302 if path == "/redirect" else 200
    events: list[h11.Event] = [h11.Response(status_code=status, headers=headers)]
    if seen.method != "HEAD":
        events += [h11.Data(data=body[at : at + 7919]) for at in range(0, len(body), 7919)]
    for event in (*events, h11.EndOfMessage()):
        writer.write(connection.send(event) or b"")
        await writer.drain()


def _headers(path: str, query: str, seen: Seen) -> list[tuple[str, str]]:
    return {
        "/redirect": [("location", query)],
        "/header-echo": [("x-echo", seen.headers.get("authorization", ""))],
        "/packed": [("content-encoding", "gzip")],
    }.get(path, [])


def _body(path: str, query: str, seen: Seen) -> bytes:
    match path:
        case "/headers":
            return "".join(f"{name}: {value}\n" for name, value in seen.headers.items()).encode()
        case "/big":
            return bytes(range(256)) * (int(query) // 256)
        case "/upload":
            return f"{len(seen.body)}\n".encode()
        case _:
            return b"hello from the shop\n"


def _certified(folder: Path) -> ssl.SSLContext:
    """A server's context with a certificate of a CA that is made for it."""
    now = datetime.datetime.now(datetime.UTC)
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test CA")])
    names = [x509.DNSName(name) for name in NAMES]

    def begun(subject: x509.Name, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder(issuer, subject, public, x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
        )

    authority = (
        begun(issuer, ca_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(ca_key, hashes.SHA256())
    )
    leaf = (
        begun(x509.Name([]), key.public_key())
        .add_extension(
            x509.SubjectAlternativeName([*names, x509.IPAddress(ipaddress.ip_address(SHOP))]),
            critical=True,
        )
        .sign(ca_key, hashes.SHA256())
    )
    (folder / "ca.pem").write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    (folder / "leaf.pem").write_bytes(leaf.public_bytes(serialization.Encoding.PEM))
    (folder / "leaf.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "leaf.pem", folder / "leaf.key")
    return context
