"""Warm-up of the variants: a small model that imitates demonstrators."""

import json
import sys
import time
from collections.abc import Set as AbstractSet
from pathlib import Path
from random import Random

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen3Config

from etude.agent.chat import CHAT_TEMPLATE, LAYOUT_TOKENS, ChatFormat
from etude.agent.summaries import LEFT_OUT, REQUEST, write_continuation
from etude.agent.trajectory import ContextLink
from etude.common.api.run.weights import Weights
from etude.common.api.storage import Storage
from etude.trainer.learner.batches import SupervisedSequence
from etude.trainer.learner.config import LearnerConfig
from etude.trainer.learner.dataset import SupervisedDataset
from etude.trainer.learner.learner import Learner
from variants_bench import rollouts
from variants_bench.demonstrators import TALK
from variants_bench.puzzles import ANIMALS, COLOURS, FILLER, INSTRUCTION, PARTS, READER

EXPORT = "warm"
BATCH = 8
COPY_WEIGHT = 6.0
VOCABULARY = 640
CALL = ("<tool_call>", "</tool_call>", "<function=read_file>", "</function>", "<parameter=path>")
TAGS = ("<|pad|>", *LAYOUT_TOKENS, *CALL, "</parameter>")


def write_model(folder: Path) -> None:
    """Write a configuration, and a tokenizer in which each word of a task is one token."""
    folder.mkdir(parents=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9]+|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    words = " ".join((*COLOURS, *ANIMALS, *FILLER))
    parts = " ".join(f"p{number}: at p{number}" for number in range(PARTS))
    said = [TALK, "It is red cat. colour animal", parts, LEFT_OUT, REQUEST, INSTRUCTION]
    texts = [words, *said, READER.system_prompt, write_continuation([INSTRUCTION], "at p1", ["a"])]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(TAGS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {name: tokenizer.token_to_id(tag) for name, tag in _TAG_OF.items()}
    Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=256,
        tie_word_embeddings=True,
        max_position_embeddings=rollouts.MODEL_CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000},
        initializer_range=0.05,
        dtype="float32",
        **ids,
    ).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(ids))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


_TAG_OF = {"eos_token_id": "<|end|>", "pad_token_id": "<|pad|>"}


def warm_up(model: Path, store: Path, *, traces: int, steps: int, seed: int) -> dict[str, float]:
    """Train a model on traces, and export it below the store; figures of the training."""
    started = time.perf_counter()
    chat = ChatFormat.load(model)
    shown = rollouts.demonstrate(chat, Random(f"traces-{seed}"), traces)  # noqa: S311 - repeatable
    facts = {chat.encode_text(f" {word}")[0] for word in (*COLOURS, *ANIMALS)}
    contexts = tuple(
        _weigh(link, facts) for trace in shown for link in trace.links if any(link.loss_mask)
    )
    dataset = SupervisedDataset(sequences=contexts, batch_size=BATCH, seed=seed)
    learner = Learner(
        LearnerConfig(
            run="variants",
            holder="bench",
            model_folder=model,
            seed=seed,
            storage=Storage(uri=store.as_uri()),
            weights=Weights(dtype="Float32"),
            threads=2,
        )
    )
    learner.start_phase(_phase(steps), 0)
    losses = []
    for step in range(1, steps + 1):
        losses.append(learner.supervised_step(dataset.batch(step - 1)).loss)
        if step % 100 == 0:
            mean, seconds = np.mean(losses[-100:]), time.perf_counter() - started
            print(f"warm-up step {step}: loss {mean:.3f}, {seconds:.0f} s", file=sys.stderr)
    learner.export(EXPORT)
    return {
        "contexts": len(contexts),
        "tokens": sum(each.token_ids.size for each in contexts),
        "loss": float(np.mean(losses[-20:])),
        "seconds": time.perf_counter() - started,
    }


def _weigh(link: ContextLink, facts: AbstractSet[int]) -> SupervisedSequence:
    """A context in which words that are copied weigh more: copying is learnt last."""
    weights = np.frombuffer(link.loss_mask, dtype=np.uint8).astype(np.float32)
    seen: set[int] = set()
    for place, token in enumerate(link.token_ids):
        if token in seen and token in facts:
            weights[place] *= COPY_WEIGHT
        seen.add(token)
    ids = np.asarray(link.token_ids, dtype=np.int32)
    return SupervisedSequence(token_ids=ids, weights=weights)


def _phase(steps: int) -> dict[str, object]:
    return {
        "name": "warm-up",
        "type": "SupervisedFineTuning",
        "maxSteps": steps,
        "optimizer": {
            "learningRate": "3e-3",
            "schedule": "WarmupStableDecay",
            "warmupSteps": min(30, steps),
            "decayStart": "0.6",
            "finalFraction": "0.05",
            "weightDecay": "0.01",
        },
        "data": [{"name": "traces", "uri": "file:///traces.jsonl"}],
    }
