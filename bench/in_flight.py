"""Generations that live through several policy versions, and whether each version is exact.

python bench/in_flight.py [--run runs/demo] [--versions 5]

Replays the newest versions of a finished run into a real engine while requests are running. Prints
which version sampled which tokens, and the text. After each commit the engine must give the token
ids and log-probabilities of a fresh engine on the exported folder of that version, with ==.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from etude.cli.verbs.weights import find_source_model
from etude.common.blobs import Store, open_store
from etude.common.weights import (
    VersionId,
    WeightManifest,
    accepted_chain,
    read_manifest,
    read_schema_bytes,
)
from etude.common.weights.replicas.mirror import Mirror
from etude.common.weights.tensors.model_folder import write_folder
from etude.common.weights.tensors.schema import parse_schema
from etude.inference.engine.interface import PolicyEngine, SampleRequest
from etude.inference.settings import EngineOptions
from etude.inference.status import ReplicaStatus
from etude.inference.updates.follower import VersionFollower
from etude.inference.updates.staging import Stager

if TYPE_CHECKING:
    from etude.inference.engine.replica import Replica

OUT = Path(__file__).parent / "out" / "in_flight.json"
REQUESTS, TOKENS, PROBE_TOKENS = 8, 400, 48
TASK = "user: The tests of this repository fail. Find out why and mend it."


@dataclass
class Streamed:
    """One request: its tokens, when each came, and who sampled them."""

    tokens: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    finish: str = "none"

    @property
    def is_sound(self) -> bool:
        """Whether the spans cover every token, in order, without a gap."""
        ends = [end for _, _, end in self.spans]
        return [start for _, start, _ in self.spans] == [0, *ends[:-1]] and ends[-1:] == [
            len(self.tokens)
        ]


class Engine(NamedTuple):
    """A replica that follows a run's store, moved by hand."""

    replica: "Replica"
    receiver: VersionFollower

    async def stream(self, prompt: Sequence[int], seed: int) -> Streamed:
        """One request that is long enough for several swaps."""
        found = Streamed()
        request = SampleRequest(
            request_id=f"stream-{seed}",
            prompt_token_ids=prompt,
            max_tokens=TOKENS,
            temperature=1.0,
            seed=seed,
            stream=True,
        )
        async for piece in self.replica.generate(request):
            found.tokens += piece.token_ids
            found.times_s += [time.perf_counter()] * len(piece.token_ids)
            if piece.finish is not None:
                found.finish = piece.finish.name
                found.spans = [(label.label, label.start, label.end) for label in piece.labels]
        return found


def build(model: Path, dtype: str, *, follows_store: bool) -> "Replica":
    """An engine; vLLM reads its environment when it is imported."""
    chosen = options(model, dtype, follows_store=follows_store)
    os.environ.update(chosen.environment())
    from etude.inference.engine import replica  # noqa: PLC0415 - vLLM reads its environment at import

    return replica.build_replica(chosen)


def options(model: Path, dtype: str, *, follows_store: bool) -> EngineOptions:
    """A small engine on this machine."""
    return EngineOptions(
        model=model,
        served_name="bench",
        dtype=dtype,
        max_model_len=512,
        max_concurrent=REQUESTS,
        kv_cache_bytes=128 << 20,
        gpus=0,
        follows_store=follows_store,
        threads=1,
    )


async def probe(engine: PolicyEngine, prompt: Sequence[int]) -> list[list[float]]:
    """What a version says to a prompt: two requests, one after the other."""
    found: list[list[float]] = []
    for temperature in (0.0, 1.0):
        request = SampleRequest(
            request_id=f"probe-{temperature}-{time.perf_counter_ns()}",
            prompt_token_ids=list(prompt),
            max_tokens=PROBE_TOKENS,
            temperature=temperature,
            seed=7,
        )
        [piece] = [piece async for piece in engine.generate(request)]
        found += [list(map(float, piece.token_ids)), list(piece.logprobs)]
    return found


async def fresh(folder: Path, dtype: str, prompt: Sequence[int]) -> None:
    """Print what an engine says that was started on a folder and knows of no version."""
    engine = build(folder, dtype, follows_store=False)
    sys.stdout.write(json.dumps(await probe(engine, prompt)) + "\n")
    sys.stdout.flush()
    os._exit(0)  # as every engine's process ends: vLLM's threads wait for nobody


def exported(store: Store, version: VersionId, model: Path, scratch: Path) -> Path:
    """A version as a model folder.

    Raises:
        SystemExit: it has no schema.
    """
    mirror = Mirror(store, scratch / f"copy-{version}")
    mirror.move_to(version)
    if mirror.schema is None:
        raise SystemExit(f"version {version} has no schema")
    folder = scratch / f"exported-{version}"
    write_folder(folder, schema=mirror.schema, words=mirror.tensor_words, source=model)
    return folder


def fresh_answers(folder: Path, dtype: str, prompt: Sequence[int]) -> list[list[float]]:
    """From a process of its own."""
    # vLLM's own choice for a folder of float32 weights is bfloat16.
    command = [sys.executable, __file__, "--fresh", str(folder), "--dtype", dtype]
    command += ["--prompt", json.dumps([*prompt])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    answers: list[list[float]] = json.loads(done.stdout.splitlines()[-1])
    return answers


async def replay(
    engine: Engine, versions: Sequence[VersionId], prompt: Sequence[int]
) -> tuple[list[Streamed], list[float]]:
    """Move through the versions while requests run; how long each swap froze them, in ms."""
    running = [
        asyncio.create_task(engine.stream(prompt, seed), name=f"request-{seed}")
        for seed in range(REQUESTS)
    ]
    pauses: list[float] = []
    for version in versions:
        await asyncio.sleep(0.25)
        status = await engine.receiver.activate(version)
        pauses.append(status.last_pause_s * 1e3)
    return [await each for each in running], pauses


def gap_at_swap(found: Sequence[Streamed]) -> float:
    """Longest wait for a token beside a median one, over all requests."""
    gaps = [[b - a for a, b in pairwise(each.times_s)] for each in found]
    flat = [gap for each in gaps for gap in each]
    return max(flat) / max(statistics.median(flat), 1e-9)


def main() -> None:
    """Replay, compare, report.

    Raises:
        SystemExit: with 1 if a bit was wrong, a span had a gap, or a request was given up; with 2
            if there is no run to replay.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--run", type=Path, default=Path("runs/demo"))
    parser.add_argument("--versions", type=int, default=5)
    parser.add_argument("--fresh", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--dtype", default="auto", help=argparse.SUPPRESS)
    parser.add_argument("--prompt", default="[]", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.fresh:
        asyncio.run(fresh(chosen.fresh, chosen.dtype, json.loads(chosen.prompt)))
    if problem := unusable(chosen.run, chosen.versions):
        print(f"in_flight: {problem}", file=sys.stderr)
        raise SystemExit(2)
    with tempfile.TemporaryDirectory(prefix="etude-in-flight-") as scratch:
        report = asyncio.run(measured(chosen.run.resolve(), chosen.versions, Path(scratch)))
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(report, indent=2) + "\n")
    sys.stdout.flush()
    os._exit(0 if report["wrong"] == 0 else 1)  # as above


def unusable(run: Path, count: int) -> str:
    """Why a run cannot be replayed, and what to do about it; empty if it can."""
    published = len(accepted_chain(open_store(run.resolve().as_uri()))) if run.is_dir() else 0
    if published > count:
        return ""
    what = f"has {published} versions" if run.is_dir() else "is not there"
    return (
        f"{run} {what}, and {count + 1} of a finished run are replayed: "
        "run `python bench/demo.py` first, or name a run with --run"
    )


async def measured(run: Path, count: int, scratch: Path) -> dict[str, float]:
    """The figures, printed as they come."""
    console = Console(highlight=False)
    model = find_source_model(str(run))
    store = open_store(run.as_uri())
    versions = accepted_chain(store)[-2 * count :]
    idle, busy = versions[:count], versions[count:]
    manifest = read_manifest(store, versions[-1])
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    prompt = tokenizer.encode(TASK).ids
    dtype = {"F32": "float32", "BF16": "bfloat16"}[_dtype(store, manifest)]
    replica = build(model, dtype, follows_store=True)
    stager = Stager(store, manifest.run, scratch / "staged")
    status = ReplicaStatus(replica="bench")
    engine = Engine(replica, VersionFollower(stager=stager, engine=replica, status=status))
    compared = Table("version", "as a fresh engine on its export", box=None)
    wrong = 0

    async def compare(version: VersionId) -> None:
        nonlocal wrong
        await engine.receiver.activate(version)
        folder = await asyncio.to_thread(exported, store, version, model, scratch)
        same = await asyncio.to_thread(fresh_answers, folder, dtype, prompt) == await probe(
            replica, prompt
        )
        wrong += not same
        compared.add_row(str(version), "same ids and log-probs" if same else "NO")

    for version in idle:
        await compare(version)
    found, pauses_ms = await replay(engine, busy, prompt)
    await compare(versions[-1])
    console.print(compared)
    for each in found[:2]:
        show(console, tokenizer, each)
    return report_of(console, found, pauses_ms, wrong)


def _dtype(store: Store, manifest: WeightManifest) -> str:
    """Number format of the largest tensor of a version."""
    data = read_schema_bytes(store, manifest.schema_sha256)
    schema = parse_schema(data, sha256=manifest.schema_sha256, where=store.url)
    return max(schema.tensors, key=lambda spec: spec.elements).dtype


def show(console: Console, tokenizer: Tokenizer, found: Streamed) -> None:
    """One request: who sampled which tokens, and the text as it reads through all swaps."""
    console.print("spans: " + ", ".join(f"{v} [{start}, {end})" for v, start, end in found.spans))
    console.print(repr(tokenizer.decode(found.tokens, skip_special_tokens=False)), style="dim")


def report_of(
    console: Console, found: Sequence[Streamed], pauses_ms: Sequence[float], wrong: int
) -> dict[str, float]:
    """The figures, one line each."""
    given_up = sum(each.finish == "ABORT" for each in found)
    unsound = sum(not each.is_sound for each in found)
    report = {
        "versions_in_one_generation": max(len(each.spans) for each in found),
        "requests": len(found),
        "given_up": given_up,
        "spans_with_gaps": unsound,
        "wrong": wrong + unsound + given_up,
        "pause_ms_median": statistics.median(pauses_ms),
        "pause_ms_max": max(pauses_ms),
        "longest_gap_over_median_gap": gap_at_swap(found),
    }
    for name, value in report.items():
        console.print(f"{name:32} {value:.4g}")
    return report


if __name__ == "__main__":
    main()
