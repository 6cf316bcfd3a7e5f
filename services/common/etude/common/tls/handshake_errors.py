"""Diagnosis of failed TLS handshakes, for which gRPC only reports an unavailable peer."""

import asyncio
import contextlib
import ssl

from etude.common.tls.credentials import Credentials
from etude.common.tls.material import CA, CERTIFICATE, KEY
from etude.common.tls.targets import TlsTarget

LIMIT_S = 2.0
"""Closing a channel may wait for this long."""


async def handshake_error(credentials: Credentials, target: TlsTarget) -> str:
    """Reason for which a handshake fails; empty if it succeeds, or the peer does not answer."""
    host, _, port = target.address.rpartition(":")
    try:
        context = await asyncio.to_thread(_context, credentials)
        async with asyncio.timeout(LIMIT_S):
            reader, writer = await asyncio.open_connection(
                host.strip("[]"), int(port), ssl=context, server_hostname=target.server_name
            )
            return await _refusal(reader, writer, credentials)
    except ssl.SSLCertVerificationError as error:
        return f"its certificate is not good for {target.server_name}: {error.verify_message}"
    except ssl.SSLError as error:
        return f"it refuses the handshake: {error.reason}"
    except (OSError, TimeoutError, ValueError):
        return ""


async def _refusal(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, credentials: Credentials
) -> str:
    """Verdict of the server on our certificate, which in TLS 1.3 it sees after our handshake.

    One that accepts it sends its HTTP/2 settings; gRPC's hangs up without an alert.
    """
    why = ""
    try:
        first = await reader.read(1)
    except ssl.SSLError as error:
        first, why = b"", str(error.reason)
    except ConnectionError:
        first = b""
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    if first:
        return ""
    shown = credentials.current()
    valid = f"valid from {shown.not_before} to {shown.not_after}"
    return f"it refuses our certificate, {shown.identity.uri}, {valid}{why and f': {why}'}"


def _context(credentials: Credentials) -> ssl.SSLContext:
    folder = credentials.folder
    context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=str(folder / CA))
    context.load_cert_chain(folder / CERTIFICATE, folder / KEY)
    context.set_alpn_protocols(["h2"])
    return context
