"""Programs of others, unchanged, on SmolLM2 behind the gateway: one for each protocol."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.support import needs
from tests.support.gateway.served import ServedGateway, serve_route
from tests.support.gateway.streaming_users import count_requests
from tests.support.programs import AbsentError, install_programs
from tests.support.weights.model_tensors import schema_of, words_of
from tests.support.weights.publishing import TrainedPolicy
from transformers import AutoModelForCausalLM

from etude.agent.chat import ChatFormat
from etude.gateway import metrics

ROOT = Path(__file__).parents[3]
CONTEXT = 4096
KV_CACHE_MIB = 512
LIMIT_S = 900
TURN_TOKENS = 48
STEPS = 3
"""Requests of the agent program, at most."""
QUESTION, MORE = "Name one city of France.", "Which river flows through it?"
TOOL = "def count_lines(path: str) -> int:\n    'Count the lines of a file.'\n    return 3\n"


class Program(NamedTuple):
    """How a program is called, as its manual has it."""

    model: str
    """Name that the program gives to its requests, or is told to."""
    commands: Sequence[Sequence[str]]
    """Each one is run in the folder of the last."""
    variables: Mapping[str, str]
    """URL stands for the gateway's address."""
    repeats: bool = True
    """False for one that may send a question without the turns before it."""


def ask_llm(model: str, limit: str) -> Sequence[Sequence[str]]:
    """A question with a tool, and another in the same conversation."""
    options = ["-o", limit, str(TURN_TOKENS)]
    return (
        ["llm", "-m", model, "--functions", TOOL, *options, QUESTION],
        ["llm", "-c", "-m", model, "--functions", TOOL, *options, MORE],
    )


PROGRAMS = {
    "chat completions": Program(
        "tiny",
        [
            [
                *("mini", "-y", "--exit-immediately", "-m", "openai/tiny", "-t", QUESTION),
                *("-c", "mini.yaml", "-c", f"agent.step_limit={STEPS}"),
                *("-c", f"model.model_kwargs.max_tokens={TURN_TOKENS}", "-o", "steps.json"),
            ]
        ],
        {
            "OPENAI_API_BASE": "URL/v1",
            "MSWEA_CONFIGURED": "1",
            "MSWEA_COST_TRACKING": "ignore_errors",
        },
        repeats=False,  # not turns in which it finds no call
    ),
    "messages": Program(
        "claude-haiku-4-5-20251001",
        ask_llm("claude-haiku-4.5", "max_tokens"),
        {"ANTHROPIC_BASE_URL": "URL"},
    ),
    "responses": Program(
        "gpt-4.1-mini",
        ask_llm("openai/gpt-4.1-mini", "max_output_tokens"),
        {"OPENAI_BASE_URL": "URL/v1"},
        repeats=False,
    ),
}


@dataclass(frozen=True)
class Engine:
    model: Path
    target: str


@pytest.fixture(scope="module")
def programs() -> Path:
    try:
        return install_programs(ROOT / "tests" / "data" / "programs" / "agents.txt")
    except AbsentError as error:
        needs.skip(f"the programs cannot be installed: {error}", "programs")


@pytest.fixture(scope="module")
def smollm2(make_module_role: Any, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """An engine that serves the published weights."""
    folder = tmp_path_factory.mktemp("smollm2")
    convert = [sys.executable, str(ROOT / "examples/smollm2/convert.py"), str(folder / "model")]
    subprocess.run(convert, check=True, capture_output=True, timeout=LIMIT_S)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    sizes = {"maxModelLen": CONTEXT, "kvCacheMib": KV_CACHE_MIB}
    role = make_module_role(folder / "role", folder / "model", sizes=sizes)
    role.publish(TrainedPolicy(schema_of(model), words_of(model)), complete=True)
    role.await_answer(role.probe_port, "/readyz", 200)
    return Engine(folder / "model", f"127.0.0.1:{role.grpc_port}")


async def run_program(
    program: Program, folder: Path, programs: Path, gateway: ServedGateway
) -> list[str]:
    """What each command printed."""
    variables = {name: each.replace("URL", gateway.url) for name, each in program.variables.items()}
    keys = dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY"), gateway.key)
    environment = {
        **{name: each for name, each in os.environ.items() if not name.startswith("PYTHON")},
        **keys,
        **variables,
        "HOME": str(folder),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "NO_COLOR": "1",
    }
    printed = []
    for command, *words in program.commands:
        process = await asyncio.create_subprocess_exec(
            programs / command,
            *words,
            cwd=folder,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
        assert process.returncode == 0, output.decode()
        printed.append(output.decode())
    return printed


def count_refused() -> float:
    """Requests that were not answered with 200."""
    return sum(
        sample.value
        for metric in metrics.REQUESTS.collect()
        for sample in metric.samples
        if sample.name.endswith("_total") and sample.labels["code"] != "200"
    )


@pytest.mark.long
@pytest.mark.parametrize("protocol", PROGRAMS)
async def test_a_program_of_others_works_unchanged_and_its_turns_are_recorded(
    tmp_path: Path, protocol: str, programs: Path, smollm2: Engine
) -> None:
    program = PROGRAMS[protocol]
    chat = ChatFormat.load(smollm2.model)
    before, refused = count_requests(), count_refused()
    (tmp_path / "home").mkdir()
    route = {"model": program.model}
    async with serve_route(
        tmp_path, chat, [smollm2.target], route, outage_s=LIMIT_S, turn_s=LIMIT_S
    ) as gateway:
        printed = await run_program(program, tmp_path / "home", programs, gateway)
        records = await gateway.records()
    assert count_refused() == refused
    assert len(records) == count_requests() - before >= len(program.commands)
    assert QUESTION in chat.decode([*records[0].prompt_token_ids])
    if program.repeats:
        assert len({record.rollout_id for record in records}) == 1
        # Each request but the first continues the tokens of the turn before it.
        ends = [record.num_prefix_tokens for record in records]
        lengths = [len(record.prompt_token_ids) + len(record.token_ids) for record in records]
        assert ends == [sum(lengths[:place]) for place in range(len(records))]
    for record in records:
        assert len(record.token_ids) == len(record.logprobs) == record.spans[-1].end
    if protocol == "chat completions":
        assert "bash" in chat.decode([*records[0].prompt_token_ids])
        assert (tmp_path / "home" / "steps.json").exists()
        return
    for output, record in zip(printed, records, strict=True):
        assert output.strip()
        assert output.strip() in chat.decode([*record.token_ids])
