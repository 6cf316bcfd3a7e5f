"""Port of the proxy inside an environment, and the variables that point programs to it."""

from collections.abc import Mapping

PORT = 3128
"""Port of the proxy inside an environment."""
BACKLOG = 128
"""Connections that wait there; a flood of them is stopped by the guest's own kernel."""
_URL = f"http://127.0.0.1:{PORT}"
_OWN = "localhost,127.0.0.1,::1"
VARIABLES: Mapping[str, str] = {
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), _URL),
    **dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), _URL),
    "NO_PROXY": _OWN,
    "no_proxy": _OWN,
}
"""Variables of commands in environments with egress; others do not have them."""
