"""Trajectory C: the demo's own policy at the demo's learning rate.

The demo's manifest, tokenizer, transcripts and learner are real: some supervised steps, then policy
steps in which transcripts stand in for rollouts and a coin for their rewards. That is no training,
but what it is for here it is: AdamW normalises the size of its steps, so the learning rate decides
how many weights change, not where the gradient points.
"""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from etude.agent.chat import ChatFormat
from etude.common.api.run.phases import Phase
from etude.common.api.storage import Storage
from etude.common.weights.tensors.words import Words
from etude.trainer.learner.batches import PolicyBatch, PolicySequence, SupervisedSequence
from etude.trainer.learner.config import LearnerConfig
from etude.trainer.learner.dataset import SupervisedDataset, load_dataset
from etude.trainer.learner.learner import Learner
from weights_bench.recipes import DemoPolicy
from weights_bench.trajectory import Trajectory, gathered, spec

MANIFEST = Path(__file__).parents[2] / "examples" / "demo" / "rlrun.yaml"
ROLLOUTS, SIBLINGS = 64, 8


def trajectories(recipe: DemoPolicy, scratch: Path) -> dict[str, Trajectory]:
    """The last policy step as fp32, which the demo publishes, and as bf16 of the same masters."""
    torch.set_num_threads(1)
    inputs = _inputs(recipe, scratch)
    phases = {each["name"]: each for each in yaml.safe_load(MANIFEST.read_text())["spec"]["phases"]}
    transcripts = {"name": "traces", "uri": f"file://{inputs / 'data/traces.jsonl'}"}
    supervised = {**phases["sft"], "data": [transcripts]}
    storage = Storage(uri=f"file://{scratch}/store")
    corpus = load_dataset(
        Phase.model_validate(supervised),
        chat=ChatFormat.load(inputs / "model"),
        context=512,
        storage=storage,
    )
    learner = Learner(
        LearnerConfig(
            run="bench",
            holder="bench",
            model_folder=inputs / "model",
            seed=recipe.seed,
            storage=storage,
        )
    )
    old, new = _learn(learner, corpus, supervised, phases["rl"], recipe)
    facts = {**asdict(recipe), "learning_rate": phases["rl"]["optimizer"]["learningRate"]}
    return {
        f"C-{dtype}": gathered(f"C {dtype}", _pairs(old, new, kind), facts)
        for dtype, kind in (("fp32", torch.float32), ("bf16", torch.bfloat16))
    }


def _inputs(recipe: DemoPolicy, scratch: Path) -> Path:
    """The demo's model folder and transcripts."""
    target = scratch / "inputs"
    if not target.exists():
        command = [sys.executable, "-m", "etude.demo.generate", "--out", str(target)]
        sizes = ["--train", "1", "--held-out", "1", "--traces", str(recipe.traces)]
        subprocess.run([*command, *sizes, "--seed", str(recipe.seed)], check=True)
    return target


def _learn(
    learner: Learner,
    corpus: SupervisedDataset,
    supervised: Mapping[str, Any],
    reinforced: Mapping[str, Any],
    recipe: DemoPolicy,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Masters before and after the last policy step."""
    learner.start_phase(supervised, 0)
    for step in range(recipe.supervised_steps):
        learner.supervised_step(corpus.batch(step))
    learner.start_phase(reinforced, 0)
    random = np.random.default_rng(recipe.seed)
    old = new = _masters(learner)
    for _ in range(recipe.policy_steps):
        old = new
        chosen = random.choice(len(corpus.sequences), ROLLOUTS, replace=False)
        transcripts = [corpus.sequences[place] for place in chosen]
        rollouts = tuple(_rollout(learner, each, place) for place, each in enumerate(transcripts))
        learner.policy_step(
            PolicyBatch(
                sequences=rollouts,
                rewards=random.integers(0, 2, ROLLOUTS).astype(np.float64),
                groups=np.arange(ROLLOUTS) // SIBLINGS,
                valid=np.ones(ROLLOUTS, np.bool_),
            )
        )
        new = _masters(learner)
    return old, new


def _rollout(learner: Learner, transcript: SupervisedSequence, place: int) -> PolicySequence:
    """A transcript as if the policy had sampled what its author wrote."""
    mask = transcript.weights == 1
    mask[0] = False
    ids = torch.from_numpy(transcript.token_ids.astype(np.int64))[None]
    places = torch.arange(1, ids.shape[1])
    with torch.no_grad():
        scores = learner.policy(ids, torch.zeros_like(places), places)
    logprobs = np.zeros(mask.size, np.float32)
    logprobs[1:] = scores.logprobs.numpy()
    return PolicySequence(
        token_ids=transcript.token_ids, loss_mask=mask, sampler_logprobs=logprobs, rollout=place
    )


def _masters(learner: Learner) -> dict[str, Tensor]:
    parameters = learner.policy.model.named_parameters()
    return {name: parameter.detach().clone() for name, parameter in parameters}


def _pairs(
    old: Mapping[str, Tensor], new: Mapping[str, Tensor], kind: torch.dtype
) -> dict[str, tuple[Any, Words, Words]]:
    wire = {torch.float32: ("F32", torch.uint32), torch.bfloat16: ("BF16", torch.uint16)}
    name_of, word = wire[kind]
    return {
        name: (
            spec(name, name_of, tuple(old[name].shape)),
            old[name].to(kind).view(word).flatten().numpy(),
            new[name].to(kind).view(word).flatten().numpy(),
        )
        for name in old
    }
