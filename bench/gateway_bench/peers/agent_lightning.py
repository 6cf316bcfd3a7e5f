"""`python agent_lightning.py PORT ENGINE PATH_FILE`: Agent Lightning's proxy, its store in memory.

Run by the Python of its own environment. Writes the path that begins a client's requests.
"""

import asyncio
import sys
from pathlib import Path

from agentlightning import LLMProxy
from agentlightning.store.memory import InMemoryLightningStore


def announce(path_file: Path, path: str) -> None:
    """Write the path as a whole."""
    path_file.with_suffix(".new").write_text(path, encoding="utf-8")
    path_file.with_suffix(".new").rename(path_file)


async def main() -> None:
    """Serve one attempt until the process is killed."""
    port, engine, path_file = sys.argv[1:]
    model = {"model": "hosted_vllm/bench", "api_base": engine, "api_key": "none"}
    store = InMemoryLightningStore(thread_safe=True)
    proxy = LLMProxy(
        int(port),
        [{"model_name": "bench", "litellm_params": model}],
        store,
        host="127.0.0.1",
        launch_mode="thread",
        callbacks=["return_token_ids", "logprobs", "opentelemetry"],
    )
    await proxy.start()
    attempt = await store.start_rollout(input={})
    announce(Path(path_file), f"/rollout/{attempt.rollout_id}/attempt/{attempt.attempt.attempt_id}")
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
