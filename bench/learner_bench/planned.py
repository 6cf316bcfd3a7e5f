"""Planned memory of the examples' models, and a plan against the allocator's own count."""

from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import yaml

from etude.common.api.run.spec import RLRunSpec
from etude.trainer.learner.gradients import backward_rows
from etude.trainer.learner.objective import imitation_loss
from etude.trainer.learner.phase import PhaseManager
from etude.trainer.learner.sequence_packing import Packing
from etude.trainer.memory_plan.phases import plan_phases
from etude.trainer.memory_plan.step import PlannedStep, build_row, plan_step
from etude.trainer.model.activation_checkpointing import Checkpointing, checkpoint_blocks
from etude.trainer.model.fsdp import RankGroup
from etude.trainer.model.policy import load_policy

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "tests" / "data" / "model-configs"
GIB = 1 << 30


def peak_gib(example: str, model: str, trainer: Mapping[str, object] | None = None) -> float:
    """Peak of a rank in the phase of an example that needs most.

    Args:
        example: folder of the manifest.
        model: shape of its model.
        trainer: fields of the role that differ from the manifest's.
    """
    given = yaml.safe_load((ROOT / "examples" / example / "rlrun.yaml").read_text())["spec"]
    given["roles"]["trainer"].update(trainer or {})
    spec = RLRunSpec.model_validate(given)
    with TemporaryDirectory() as name:
        folder = _copy_config(model, Path(name))
        phases = plan_phases(spec, folder, limit_bytes=float("inf"))
        return max(phase.peak.num_bytes for phase in phases) / GIB


def plan_over_measured(tokens: int, peak_bytes: Callable[[Callable[[], object]], int]) -> float:
    """Planned peak of a step of SmolLM2-135M's shape on a CPU, over the measured one.

    Args:
        tokens: of a microbatch.
        peak_bytes: most bytes that a call allocates.
    """
    phase = RLRunSpec.model_validate(
        yaml.safe_load((ROOT / "examples" / "smollm2" / "rlrun.yaml").read_text())["spec"]
    ).phases[0]
    planned = PlannedStep(
        phase=phase, tokens=tokens, packed=True, on_gpu=False, checkpointing=Checkpointing.BLOCKS
    )
    with TemporaryDirectory() as name:
        folder = _copy_config("smollm2-135m", Path(name))
        expected = plan_step(folder, planned).num_bytes
        policy = load_policy(folder, seed=0)
    checkpoint_blocks(policy.model, planned.checkpointing)
    alone = RankGroup(rank=0, size=1, device=torch.device("cpu"))
    manager = PhaseManager(policy, alone)
    state = manager.begin(phase, 0, under_way=None)
    state.optimiser.reset_moments(updates=1)
    kept = [*policy.parameters(), *state.optimiser.moments().values()]

    def run() -> None:
        manager.copy_state("checkpoint", state, is_published=False)
        rows = [build_row(tokens)] * 2
        packing = Packing(max_tokens=tokens, packed=True)
        backward_rows(policy, rows, imitation_loss, ranks=alone, packing=packing)
        state.optimiser.apply(step=0, loss=0.0)

    found = sum(t.numel() * t.element_size() for t in kept) + peak_bytes(run)
    return expected / found


def _copy_config(model: str, folder: Path) -> Path:
    (folder / "config.json").write_bytes((CONFIGS / f"{model}.json").read_bytes())
    return folder
