"""What an environment sees of its way out: a port of its own, and variables that name it."""

from collections.abc import Mapping

PORT = 3128
"""Where the proxy listens inside of an environment."""
BACKLOG = 128
"""Connections that wait there; a flood of them meets its own kernel."""
_URL = f"http://127.0.0.1:{PORT}"
_OWN = "localhost,127.0.0.1,::1"
VARIABLES: Mapping[str, str] = {
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), _URL),
    **dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), _URL),
    "NO_PROXY": _OWN,
    "no_proxy": _OWN,
}
"""Of commands in environments that have a way out; others see none of it."""
