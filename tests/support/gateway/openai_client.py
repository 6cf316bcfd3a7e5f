"""The openai client, pointed at a gateway."""

import openai
from tests.support.gateway.served import ServedGateway


def client_of(gateway: ServedGateway, key: str | None = None) -> openai.AsyncOpenAI:
    """Make a client of one user, Alice unless a key is given, that repeats nothing."""
    return openai.AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key=key or gateway.key, max_retries=0, timeout=30
    )
