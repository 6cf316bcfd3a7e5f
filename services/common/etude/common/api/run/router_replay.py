"""Routers of mixtures of experts in the learner: replay of experts, and their balance."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import JsonValue

from etude.common.api.meta import Fraction, Model, Rule, number
from etude.common.api.run.algorithms import PARAMETERS, AlgorithmParameters


class RouterReplay(Model):
    """Experts that tokens take in the learner, which must have routers; their weights are live.

    Engine and learner round differently, so that some tokens would take other experts where they
    are trained than where they were sampled, and several updates move the routers.
    """

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="double(self.plausibility) < 1.0",
            holds=lambda s: number(s.plausibility) < 1,
            message="plausibility must be below 1: with 1 no expert is replayed",
            fix='give a share, for example "0.5", or set mode: Off',
            field_path=".plausibility",
        ),
        Rule(
            cel="self.mode != 'Off' || double(self.plausibility) == 0.0",
            holds=lambda s: s.mode != "Off" or number(s.plausibility) == 0,
            message="plausibility is ignored with mode Off",
            fix="remove it, or set mode: Recorded",
            field_path=".plausibility",
        ),
    )

    mode: Literal["Off", "Recompute", "Recorded"] = "Recorded"
    """Off: those of the live routers. Recorded: those that engines recorded, for one update per
    batch. Recompute: those of the learner's pass before the first update, for several updates per
    batch."""
    plausibility: Fraction = "0"
    """Replays an expert only if its live score is at least this share of the last one that the live
    routers would choose; the best others take the places of the rest. 0 replays all."""


def find_replay_problem(mode: str, algorithm: str, parameters: Mapping[str, JsonValue]) -> str:
    """Problem of a mode with the updates per batch of an algorithm; empty if there is none."""
    known = PARAMETERS.get(algorithm, AlgorithmParameters)
    updates = parameters.get("updatesPerBatch", known.model_fields["updates_per_batch"].default)
    if mode == "Recorded" and updates != 1:
        return (
            f"recorded experts are those of the sampler, from which {updates} updates per batch"
            " move away; set Recompute"
        )
    if mode == "Recompute" and updates == 1:
        return (
            "with one update per batch no weight changes between the passes of a batch, which"
            " choose the same experts without replay; set Recorded"
        )
    return ""


def find_balance_problem(rate: str, *, has_lora: bool) -> str:
    """Problem of a phase whose updates move the biases of routers; empty if there is none.

    Args:
        rate: by which they move.
        has_lora: true if adapters alone are trained.
    """
    if has_lora and number(rate):
        return "adapters alone are trained, and have no biases; set 0, or remove roles.trainer.lora"
    return ""


def find_engine_problem(
    *, has_gpus: bool, pipeline: int, copies: int, engine_args: Mapping[str, JsonValue]
) -> str:
    """Problem of engines that are to record experts; empty if there is none.

    Args:
        has_gpus: true if engines run on GPUs.
        pipeline: groups of layers of an engine.
        copies: of the attention layers of an engine.
        engine_args: further arguments of vLLM.
    """
    if pipeline > 1 or copies > 1:
        return (
            "engines record the experts of one group of layers and one copy; set pipelineParallel"
            " and dataParallel of roles.inference.engine to 1, or mode: Off"
        )
    if has_gpus and engine_args.get("enforce_eager") is not True:
        return (
            "graphs of engines on GPUs record no experts; set roles.inference.engine.engineArgs:"
            " {enforce_eager: true}, or mode: Off"
        )
    return ""
