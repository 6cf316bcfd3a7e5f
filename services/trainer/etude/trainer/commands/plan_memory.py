"""`python -m etude.trainer.commands.plan_memory FOLDER`: memory of a learner rank, as JSON.

The run's spec comes as JSON on the standard input; nothing of the model but config.json is read.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from pydantic import JsonValue

from etude.common.api.run.spec import RLRunSpec
from etude.common.errors import InvalidFieldError, UserError
from etude.trainer.memory_plan.allocations import Peak

GIB = 1 << 30


def main() -> None:
    """Print one object: the ranks, and the memory of each phase.

    Raises:
        SystemExit: with 4 if the model or the spec is refused; the problem is printed.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="with the model's config.json")
    parser.add_argument("--limit-gib", type=float, required=True, help="memory of a rank")
    chosen = parser.parse_args()
    spec = RLRunSpec.model_validate_json(sys.stdin.read())
    # Torch comes once it is known what to plan.
    from etude.trainer.memory_plan.phases import plan_phases  # noqa: PLC0415

    ranks_per_pod = spec.roles.trainer.ranks_per_pod
    try:
        for memory in plan_phases(spec, chosen.folder, limit_bytes=chosen.limit_gib * GIB):
            row: dict[str, JsonValue] = {
                "phase": memory.phase,
                "tokens": memory.step.tokens,
                "shard": memory.step.shard,
                "replicate": memory.step.replicate,
                "context": memory.step.context,
                "device": "GPU" if memory.step.on_gpu else "CPU",
                "ranksPerPod": ranks_per_pod,
                **_describe(memory.peak, ranks_per_pod),
                "parts": {kind.value: _gib(size) for kind, size in memory.peak.by_kind.items()},
                "changes": [
                    {
                        "change": change.proposal.text,
                        **_describe(change.peak, change.proposal.spec.roles.trainer.ranks_per_pod),
                    }
                    for change in memory.changes
                ],
            }
            sys.stdout.write(json.dumps(row) + "\n")
    except (UserError, InvalidFieldError) as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(4) from error


def _describe(peak: Peak, ranks_per_pod: int) -> Mapping[str, JsonValue]:
    return {
        "peakGib": _gib(peak.num_bytes),
        "podGib": _gib(peak.num_elsewhere * ranks_per_pod),
    }


def _gib(num_bytes: int) -> float:
    return round(num_bytes / GIB, 3)


if __name__ == "__main__":
    main()
