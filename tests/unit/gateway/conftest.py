"""Chat formats and gateways for tests."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from tests.support.gateway.served import PlayedEngine, ServedGateway, serve_gateway
from tests.support.native_template import TEMPLATE

from etude.agent.chat import ChatFormat

TOKENIZER = Path(__file__).parents[1] / "agent" / "model"


@pytest.fixture(scope="session")
def plain() -> ChatFormat:
    """A template that shows no tools."""
    return ChatFormat.load(TOKENIZER)


@pytest.fixture(scope="session")
def native(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    """A template that shows tools, in the form of Hermes."""
    return load_template(tmp_path_factory.mktemp("native"), TEMPLATE)


@pytest.fixture(scope="session")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    """A template whose model thinks in tags before it answers."""
    return load_template(tmp_path_factory.mktemp("thinking"), "{# <think> </think> #}" + TEMPLATE)


def load_template(folder: Path, template: str) -> ChatFormat:
    (folder / "tokenizer.json").write_bytes((TOKENIZER / "tokenizer.json").read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    (folder / "chat_template.jinja").write_text(template)
    return ChatFormat.load(folder)


Serve = Callable[..., AbstractAsyncContextManager[ServedGateway]]


@pytest.fixture
def outage_s() -> int:
    """Seconds without an engine that a turn survives: more than a busy machine needs for one."""
    return 10


@pytest.fixture
def serve(tmp_path: Path, outage_s: int) -> Serve:
    """Serves a policy that says one text for each prompt, from one engine or several."""

    def start(
        chat: ChatFormat,
        say: Callable[[str], str],
        *,
        engines: int = 1,
        route: dict[str, object] | None = None,
    ) -> AbstractAsyncContextManager[ServedGateway]:
        played = [PlayedEngine(chat, say) for _ in range(engines)]
        return serve_gateway(tmp_path, played, route or {}, outage_s=outage_s)

    return start


@pytest.fixture
async def gateway(serve: Serve, plain: ChatFormat) -> AsyncIterator[ServedGateway]:
    """A policy that counts its turns."""
    async with serve(plain, lambda prompt: f"Turn {prompt.count('<|assistant|>')}.") as served:
        yield served
