"""Rollout workers of the bench in a process of their own, which write tokens as real ones do.

python -m controller_bench.writer FOLDER TOKENS SEED reads groups from standard input, writes the
tokens of each rollout to the store of a run, and answers with the records. Frames are pickled
tuples behind their length in 8 bytes.
"""

import asyncio
import os
import pickle
import random
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from etude.common.blobs import Store, open_store
from etude.common.weights import VersionId
from etude.trainer.contents.objects import group_prefix, write_links
from etude.v1 import journal_pb2, rewards_pb2, rollout_pb2, weights_pb2

PROMPT_TOKENS = 32
LENGTH_BYTES = 8
WRITES_AT_ONCE = 8
"""Groups: a worker writes in threads, too."""
BENCH, ROOT = Path(__file__).parents[1], Path(__file__).parents[2]


class GroupJob(NamedTuple):
    """A group whose rollouts have ended."""

    group_id: str
    task_id: str
    names: tuple[str, ...]
    """Ids of its rollouts."""
    indices: tuple[int, ...]
    seed: int
    oldest: tuple[int, int]
    """Version when it began: epoch and number."""
    newest: tuple[int, int]


@dataclass(slots=True)
class GroupWriter:
    """Makes the records of groups."""

    store: Store
    tokens: int
    """Of each rollout."""
    seed: int
    _links: dict[tuple[VersionId, VersionId], rollout_pb2.Link] = field(default_factory=dict)

    def write(self, job: GroupJob) -> tuple[bytes, ...]:
        """Write the tokens of a group; returns its records."""
        return tuple(
            self._write_one(job, name, index)
            for name, index in zip(job.names, job.indices, strict=True)
        )

    def _write_one(self, job: GroupJob, name: str, index: int) -> bytes:
        oldest, newest = VersionId(*job.oldest), VersionId(*job.newest)
        if (oldest, newest) not in self._links:
            self._links[oldest, newest] = _link(self.tokens, self.seed, oldest, newest)
        rollout = rollout_pb2.Rollout(rollout_id=name, links=[self._links[oldest, newest]])
        content = write_links(self.store, group_prefix(job.group_id), rollout)
        reward = float((job.seed >> index) & 1)
        return journal_pb2.JournalRollout(
            rollout=rollout_pb2.Rollout(
                rollout_id=name,
                group_id=job.group_id,
                task_id=job.task_id,
                index=index,
                seed=job.seed,
                costs=rollout_pb2.Costs(turns=1, completion_tokens=self.tokens - PROMPT_TOKENS),
                ending=rollout_pb2.ENDING_STOPPED,
                oldest=oldest.to_proto(),
                newest=newest.to_proto(),
            ),
            reward=rewards_pb2.RewardRecord(rollout_id=name, reward=reward, success=reward),
            content=content,
        ).SerializeToString()


def _link(tokens: int, seed: int, oldest: VersionId, newest: VersionId) -> rollout_pb2.Link:
    draw = random.Random(seed)  # noqa: S311 - a simulation
    sampled = tokens - PROMPT_TOKENS
    span = weights_pb2.PolicySpan(
        sampled=newest.to_proto(),
        context=oldest.to_proto(),
        start=PROMPT_TOKENS,
        end=tokens,
        replica="engine-0",
    )
    ids: Sequence[int] = [draw.randrange(200) for _ in range(tokens)]
    return rollout_pb2.Link(
        token_ids=ids,
        loss_mask=bytes(PROMPT_TOKENS) + b"\x01" * sampled,
        sampler_logprobs=[0.0] * PROMPT_TOKENS + [-draw.random() for _ in range(sampled)],
        spans=[span],
    )


def encode_frame(content: tuple[object, ...]) -> bytes:
    """Pickle a tuple behind its length."""
    data = pickle.dumps(content)
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


@dataclass(slots=True)
class WriterProcess:
    """A writer and the groups that it was given."""

    process: asyncio.subprocess.Process
    _answers: dict[int, "asyncio.Future[tuple[bytes, ...]]"] = field(default_factory=dict)
    _asked: int = 0
    _reading: "asyncio.Task[None] | None" = None

    @classmethod
    async def start(cls, folder: Path, *, tokens: int, seed: int) -> "WriterProcess":
        """Start a writer for the run below a folder."""
        command = [sys.executable, "-m", "controller_bench.writer"]
        process = await asyncio.create_subprocess_exec(
            *command,
            *(str(folder), str(tokens), str(seed)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": f"{BENCH}:{ROOT}"},
        )
        writer = cls(process)
        writer._reading = asyncio.create_task(writer._read(), name="records")
        return writer

    async def write(self, job: GroupJob) -> tuple[bytes, ...]:
        """Have the tokens of a group written; returns its records."""
        assert self.process.stdin is not None  # noqa: S101 - a pipe
        number, self._asked = self._asked, self._asked + 1
        answer: asyncio.Future[tuple[bytes, ...]] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        self.process.stdin.write(encode_frame((number, *job)))
        return await answer

    async def _read(self) -> None:
        assert self.process.stdout is not None  # noqa: S101 - a pipe
        while True:
            head = await self.process.stdout.readexactly(LENGTH_BYTES)
            data = await self.process.stdout.readexactly(int.from_bytes(head, "little"))
            number, *records = pickle.loads(data)  # noqa: S301 - of our own process
            self._answers.pop(number).set_result(tuple(records))

    async def close(self) -> None:
        """End the writer."""
        if self._reading is not None:
            self._reading.cancel()
        self.process.kill()
        await self.process.wait()


def _read_frame(stream: BinaryIO) -> tuple[object, ...] | None:
    head = stream.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        return None
    data = stream.read(int.from_bytes(head, "little"))
    return cast("tuple[object, ...]", pickle.loads(data))  # noqa: S301 - of our own process


def main() -> None:
    """Answer until the input ends."""
    folder, tokens, seed = sys.argv[1:]
    writer = GroupWriter(open_store((Path(folder) / "run").as_uri()), int(tokens), int(seed))
    writing = threading.Lock()

    def answer(number: object, job: GroupJob) -> None:
        frame = encode_frame((number, *writer.write(job)))
        with writing:
            sys.stdout.buffer.write(frame)
            sys.stdout.buffer.flush()

    with ThreadPoolExecutor(WRITES_AT_ONCE) as pool:
        while (frame := _read_frame(sys.stdin.buffer)) is not None:
            number, *job = frame
            pool.submit(answer, number, GroupJob._make(job))


if __name__ == "__main__":
    main()
