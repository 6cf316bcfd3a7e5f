"""How long GPUs wait for environments under five ways to size a pool, and what each costs.

python bench/autoscaler.py [--waves N] [--seed N] [--trace NAME] [--seeds N]

The same simulated runs, drawn from a seed, meet the same simulated pool: only what decides the
number of replicas differs. `kpa` is Knative's autoscaler with its own parameters; `kpa_plan` is the
operator's own decision for a pool in mode Predictive that sets nothing, with the trainer's own
forecast, which sees the past alone. Two more rows say what is due to settings: `kpa_tuned` has
those of `kpa_plan` while there is a plan, without plans; `kpa_plan_patient` has plans and the
settings of mode Reactive. It takes a minute of one core.

Examples:
  make bench-autoscaler                                      the table, and its file
  python bench/autoscaler.py --trace lognormal --waves 100    one trace, longer
  python bench/autoscaler.py --seeds 6                        and what six seeds say (three minutes)
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from autoscaler_bench.report import figures, table
from autoscaler_bench.seeds import ratios, sentence
from autoscaler_bench.simulation import Mode, Outcome, Simulation
from autoscaler_bench.traces import traces
from rich.console import Console

OUT = Path(__file__).parent / "out" / "autoscaler.json"


def main() -> None:
    """Print the table and write bench/out/autoscaler.json.

    Raises:
        SystemExit: there is no trace of that name.
    """
    options = _options()
    began_s = time.process_time()
    found: dict[str, dict[Mode, Outcome]] = {
        trace.name: {mode: Simulation(trace, mode).outcome() for mode in Mode}
        for trace in traces(options.waves, options.seed)
        if options.trace in {None, trace.name}
    }
    if not found:
        names = ", ".join(trace.name for trace in traces(1, 0))
        raise SystemExit(f"--trace {options.trace}: there is none of that name; one of {names}")
    said: dict[str, Any] = figures(found)
    said |= {
        "waves": options.waves,
        "seed": options.seed,
        "cpu_s": round(time.process_time() - began_s, 1),
    }
    console = Console(width=None if Console().is_terminal else 200)
    console.print(table(found, said))
    console.print(
        f"KPA + plan: {said['plan_idle_over_kpa_idle']:.3f} of KPA's idle GPU-seconds (goal 0.25)"
        f" at {said['plan_sandbox_over_kpa_sandbox']:.3f} of its sandbox-seconds (goal 1);"
        f" a decision takes {said['decide_us']:.0f} us of CPU; {said['cpu_s']} CPU seconds in all"
    )
    if options.seeds > 1:
        seeds = range(options.seed, options.seed + options.seeds)
        every = [ratios(options.waves, seed) for seed in seeds]
        console.print(sentence(every))
        said["seeds"] = [each._asdict() for each in every]
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(said, indent=2) + "\n")


def _options() -> argparse.Namespace:
    what, _, examples = __doc__.partition("\nExamples:\n")
    parser = argparse.ArgumentParser(
        description=what,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--waves", type=int, default=24, help="of each trace")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trace", help="this one alone")
    parser.add_argument("--seeds", type=int, default=1, help="compare ours with KPA for so many")
    return parser.parse_args()


if __name__ == "__main__":
    main()
