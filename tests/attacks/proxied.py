"""Attacks through the way out that a pool lists: to what it does not list, and on the proxy."""

from collections.abc import Mapping

from tests.attacks.arena import REACHED

PROXIED: Mapping[str, object] = {
    "egress": "Custom",
    "rules": [
        {"name": "mirror", "host": "mirror.example.com", "port": 80, "mode": "Http"},
        {"name": "below", "host": "*.mirror.example.com"},
    ],
}
"""Hosts that there are not: what is tested is what stands before them."""
_STATUS = {"malformed": 400, "unreachable": 502}
"""By verdict; 403 otherwise."""
_CLIENT = """
import socket, sys
s = socket.create_connection(("127.0.0.1", 3128), 9)
s.sendall(sys.stdin.buffer.read())
s.shutdown(1)
print(s.makefile("rb").read(9999).decode("latin-1"))
"""
TALK = (
    "{ if command -v nc >/dev/null; then nc -w 9 127.0.0.1 3128;"
    f" else python3 -c '{_CLIENT}'; fi; }} 2>/dev/null"
)
"""Sends its input to the proxy, and prints what comes back."""


def _asks(verdict: str, *heads: str) -> str:
    """Say each to the proxy, and tell whether it answers with anything but this one refusal.

    Without a network a proxy that lets everything through answers 502, so that it gave no page is
    no sign that it refused.
    """
    answer = f'"HTTP/1.1 {_STATUS.get(verdict, 403)} Refused"*"etude refuses: {verdict}: "*'
    if verdict == "unreachable":
        answer += (
            '|""'  # name servers that say nothing keep it waiting longer than an attacker does
        )
    return "".join(
        f"said=$(printf '%b' '{head}' | {TALK}); case \"$said\" in"
        f' *HTTP/1.1*HTTP/1.1*) echo "{REACHED}: $said";;'
        f" {answer}) ;;"
        f' *) echo "{REACHED}: $said";; esac; '
        for head in heads
    )


def _get(url: str) -> str:
    return f"GET {url} HTTP/1.1\\r\\nHost: mirror.example.com\\r\\n\\r\\n"


def _connect(target: str) -> str:
    return f"CONNECT {target} HTTP/1.1\\r\\nHost: {target}\\r\\n\\r\\n"


METADATA = (
    "169.254.169.254",
    "[fd00:ec2::254]",
    "2852039166",
    "0xa9fea9fe",
    "metadata.google.internal",
)

PROXY: Mapping[str, str] = {
    "the proxy for metadata": _asks(
        "address", *(_get(f"http://{host}/latest/") for host in METADATA)
    ),
    "a tunnel to metadata": _asks("address", *(_connect(f"{host}:80") for host in METADATA)),
    "a tunnel to a foreign host": _asks("not_listed", _connect("example.net:443"))
    + _asks("address", _connect("1.1.1.1:443")),
    "a tunnel to the node itself": _asks(
        "address",
        *(_connect(f"{host}:{port}") for host in ("127.0.0.1", "localhost") for port in (22, 3128)),
    ),
    "a tunnel to another port": _asks("not_listed", _connect("a.mirror.example.com:22")),
    "names that look like listed ones": _asks(
        "not_listed", _get("http://mirror.example.com.example.net/")
    )
    + _asks(
        "malformed",
        _get("http://mirror.example.com@example.net/"),
        _get("http://example.net#mirror.example.com/"),
        _get("http://mirror.example.com%00.example.net/"),
    ),
    "a second request behind the first": _asks(
        "not_listed", _get("http://example.net/") + _get("http://169.254.169.254/")
    )
    + _asks(
        "unreachable",
        "GET http://mirror.example.com/ HTTP/1.1\\r\\nHost: a\\r\\nContent-Length: 0\\r\\n"
        "Transfer-Encoding: chunked\\r\\n\\r\\n0\\r\\n\\r\\n" + _get("http://example.net/"),
    ),
    "line breaks in a request": _asks(
        "malformed",
        "GET http://mirror.example.com/ HTTP/1.1\\nHost: a\\rHost: example.net\\r\\n\\r\\n",
        "GET http://mirror.example.com/\\r\\nHost:example.net HTTP/1.1\\r\\n\\r\\n",
    ),
    # One whose sender goes on may be closed before it reads its refusal.
    "garbage for the proxy": "for n in 1 2 3 4 5; do said=$(head -c 100000 /dev/urandom"
    f' | {TALK}); case "$said" in *HTTP/1.1*HTTP/1.1*) echo "{REACHED}: $said";;'
    ' ""|"HTTP/1.1 400 Refused"*) ;;'
    f' *) echo "{REACHED}: $said";; esac; done; true',
    "two dozen connections that say nothing": "for n in $(seq 24); do"
    f" (printf 'GET http://'; sleep 2) | {TALK} >/dev/null & done; sleep 3; true",
}
