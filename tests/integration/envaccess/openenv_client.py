"""What a user of OpenEnv runs; its package pins too much to be installed beside ours."""

import asyncio
import json
import sys

from openenv.core.generic_client import (  # type: ignore[import-not-found] # theirs
    GenericEnvClient,
)


async def episodes(url: str) -> list[object]:
    """Two episodes with a mistake in between."""
    seen: list[object] = []
    async with GenericEnvClient(base_url=url) as environment:
        begun = await environment.reset(seed=3, episode_id="first")
        seen.append([begun.reward, begun.done, len(begun.observation["tools"])])
        for tool, arguments in (
            ("write_file", {"path": "a.txt", "content": "hello"}),
            ("read_file", {"path": "a.txt"}),
        ):
            done = await environment.step({"tool": tool, "arguments": arguments})
            seen.append(done.observation["text"])
        seen.append(await environment.state())
        try:
            await environment.step({"nothing": 1})
        except RuntimeError as error:
            seen.append(str(error))
        await environment.reset()
        after = await environment.step({"tool": "read_file", "arguments": {"path": "a.txt"}})
        seen.append([after.observation["text"], after.observation["is_error"]])
        end = await environment.step({"tool": "finish", "arguments": {"message": "done"}})
        seen.append(end.done)
    return seen


sys.stdout.write(json.dumps(asyncio.run(episodes(sys.argv[1]))))
