"""TRL's side: GRPOTrainer on the CPU, completions by transformers' generate()."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoTokenizer,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer
from typing_extensions import override

from learner_bench.side import Order, Orders, StepReport, pin_threads, profile_operators
from learner_bench.workload import MOST_TOKENS, SIBLINGS, StepLoad, Workload

ROWS = 4
"""Rows of a microbatch; padded to the longest prompt and the longest completion of the step."""


class GivenLengths(LogitsProcessor):  # type: ignore[misc]  # mypy does not follow transformers
    """Ends each completion after its number of tokens, and not before."""

    def __init__(self, prompt_tokens: int, lengths: list[int], end_ids: list[int]) -> None:
        self._prompt_tokens = prompt_tokens
        self._lengths = torch.tensor(lengths)
        self._end_ids = end_ids

    @override
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        place = input_ids.shape[1] - self._prompt_tokens + 1
        scores[:, self._end_ids] = -torch.inf
        last = self._lengths == place
        scores[last] = -torch.inf
        scores[last, self._end_ids[0]] = 0.0
        return scores


class Steps(TrainerCallback):  # type: ignore[misc]  # as above
    """Waits for an order before each step, and answers it after."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._orders = Orders()
        self._order = Order(0, is_profiled=False)
        self._report = StepReport()
        self._training = contextlib.ExitStack()
        self.end_ids: list[int] = []

    @property
    def load(self) -> StepLoad:
        """The step under way."""
        return self._workload.steps[self._order.step]

    def generate(self, model: PreTrainedModel, inputs: Mapping[str, Any]) -> torch.Tensor:
        """Sample with transformers; the training part of the step begins where this ends."""
        load, report = self.load, self._report
        ends = GivenLengths(inputs["input_ids"].shape[1], load.lengths, self.end_ids)
        with report.rollout.measure():
            sampled: torch.Tensor = type(model).generate(
                model, **inputs, logits_processor=LogitsProcessorList([ends])
            )
        report.rollout.tokens = sum(load.lengths)
        report.train.tokens = report.rollout.tokens + int(inputs["attention_mask"].sum())
        self._training.enter_context(report.train.measure())
        self._training.enter_context(profile_operators(report, enabled=self._order.is_profiled))
        return sampled

    def reward(self, **_: object) -> list[float]:
        """Rewards of the step, in the order of its rollouts."""
        return self.load.rewards

    @override
    def on_train_begin(self, *_: object, **__: object) -> None:
        self._orders.report_ready()

    @override
    def on_step_begin(self, *_: object, **__: object) -> None:
        order = self._orders.take()
        if order is None:
            os._exit(0)
        self._order, self._report = order, StepReport()

    @override
    def on_step_end(self, *_: object, **__: object) -> None:
        self._training.close()
        self._orders.answer(self._report)


def main() -> None:
    """Train until orders end.

    Both sides make one update from one pass over each token: no KL penalty, no old log-probs.
    Activation checkpointing, which TRL has on by default and which costs a third, is off here too.
    """
    workload = Workload.read(Path(sys.argv[1]))
    pin_threads(workload.threads)
    steps = Steps(workload)
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            use_vllm=False,
            gradient_checkpointing=False,
            model_init_kwargs={"dtype": "float32"},
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            max_steps=len(workload.steps),
            num_generations=SIBLINGS,
            per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=len(workload.steps[0].lengths) // ROWS,
            max_completion_length=MOST_TOKENS,
            loss_type="dr_grpo",
            scale_rewards="none",
            beta=0.0,
            shuffle_dataset=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=workload.model,
            reward_funcs=steps.reward,
            args=config,
            train_dataset=Dataset.from_list(
                [{"prompt": prompt} for step in workload.steps for prompt in step.prompts]
            ),
            processing_class=AutoTokenizer.from_pretrained(workload.model, padding_side="left"),
            callbacks=[steps],
        )
        steps.end_ids = trainer.eos_token_ids
        model = trainer.model
        model.generate = lambda **inputs: steps.generate(model, inputs)
        trainer.train()


if __name__ == "__main__":
    main()
