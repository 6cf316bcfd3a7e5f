"""Endpoint, token and limits of a hub."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Self
from urllib.parse import urlsplit


class Patience(NamedTuple):
    """Limits on the time that a hub is given."""

    attempts: int = 6
    """Of one request."""
    first_pause_s: float = 0.5
    longest_pause_s: float = 300.0
    """Also of a pause that the hub asks for with Retry-After."""
    request_s: float = 60.0
    """Longest time without a byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubAccess:
    """Endpoint and token of a hub."""

    endpoint: str | None = None
    """http(s)://host[:port][/path]; None for huggingface.co."""
    token: str | None = field(default=None, repr=False)
    patience: Patience = field(default_factory=Patience)

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Self:
        """Read HF_ENDPOINT and HF_TOKEN.

        Raises:
            ValueError: one of them has a form that no request can carry.
        """
        endpoint = env.get("HF_ENDPOINT") or None
        if endpoint is not None and not re.fullmatch(r"https?://[-A-Za-z0-9._:/\[\]]+", endpoint):
            raise ValueError("HF_ENDPOINT: is no http(s)://host[:port][/path]")
        token = env.get("HF_TOKEN", "").strip()
        if not token.isprintable() or not token.isascii():
            raise ValueError("HF_TOKEN: has characters that no token has")
        return cls(endpoint=endpoint.rstrip("/") if endpoint else None, token=token or None)

    @property
    def host(self) -> str:
        """Host of the endpoint, for messages."""
        return urlsplit(self.endpoint or "https://huggingface.co").netloc
