"""How engines share rollouts: throughput, balance and prefix hits of 1, 2, 4 and 8 engines.

python bench/routing.py [--seconds N] [--seed N]

The engines are simulated: a fixed time per token, slots that queue, and bounded caches of prefix
blocks. Turns have heavy-tailed lengths, and time is virtual: the event loop jumps to the next
timer. The router, the choice of an engine, the client that keeps the tokens of a lost engine, and
the exchange of loads between two rollout workers are the product's own. The wire is left out: the
client reads messages from memory; tests/integration/trainer/test_engine_routing.py runs it over
gRPC. Random and round robin run beside on the same rollouts. In the last row one engine joins four
after a third of the time, and one is lost after two thirds.

Examples:
  make bench-routing                   the table, and its file
  python bench/routing.py --seconds 60  a first look
"""

import argparse
import json
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table
from routing_bench.fleet import Fleet, Outcome, RandomRouter, RoundRobinRouter

OUT = Path(__file__).parent / "out" / "routing.json"
SIZES = (1, 2, 4, 8)
WARM_UP_S = 40


def main() -> None:
    """Print the table and write bench/out/routing.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began_s = time.process_time()
    size = {"seconds": options.seconds, "warm_up": WARM_UP_S, "seed": options.seed}
    routed = {n: Fleet(num_engines=n, **size).run() for n in SIZES}
    others = {
        "random": Fleet(num_engines=SIZES[-1], router=RandomRouter, **size).run(),
        "round_robin": Fleet(num_engines=SIZES[-1], router=RoundRobinRouter, **size).run(),
    }
    third = options.seconds / 3
    disturbed = Fleet(num_engines=4, joins_at=third, lost_at=2 * third, **size).run()
    figures = _figures(routed, others, disturbed)
    figures |= {"seconds": options.seconds, "seed": options.seed}
    figures["cpu_s"] = round(time.process_time() - began_s, 1)
    _print(routed, others, disturbed, figures)
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(figures, indent=1) + "\n")


def _figures(
    routed: dict[int, Outcome], others: dict[str, Outcome], disturbed: Outcome
) -> dict[str, float]:
    one, largest = routed[1].tokens_per_s, routed[SIZES[-1]]
    scaling = {f"scaling_{n}": round(routed[n].tokens_per_s / one, 3) for n in SIZES[1:]}
    beside = {
        f"{name}_{key}": round(getattr(outcome, key), 3)
        for name, outcome in others.items()
        for key in ("imbalance", "hit_ratio")
    }
    return {
        **scaling,
        "imbalance": round(largest.imbalance, 3),
        "prefix_hit_ratio": round(largest.hit_ratio, 3),
        **beside,
        **{f"{name}_scaling_8": round(o.tokens_per_s / one, 3) for name, o in others.items()},
        "disturbed_scaling": round(disturbed.tokens_per_s / one, 3),
        "disturbed_interrupted": disturbed.counts.interrupted,
        "disturbed_faults": disturbed.faults,
        "interrupted_length_ratio": round(disturbed.counts.interrupted_length_ratio, 3),
    }


def _print(
    routed: dict[int, Outcome],
    others: dict[str, Outcome],
    disturbed: Outcome,
    figures: dict[str, float],
) -> None:
    table = Table("engines", "tokens/s over one", "max/mean per second", "prefix hits over best")
    rows = {str(n): outcome for n, outcome in routed.items()}
    rows |= {f"{SIZES[-1]}, {name}": outcome for name, outcome in others.items()}
    rows["4 to 5, then a loss"] = disturbed
    for name, outcome in rows.items():
        scaling = outcome.tokens_per_s / routed[1].tokens_per_s
        table.add_row(
            name, f"{scaling:.2f}", f"{outcome.imbalance:.3f}", f"{outcome.hit_ratio:.3f}"
        )
    console = Console()
    console.print(table)
    console.print(
        f"Goals: 0.95 of linear, 1.1, 0.9. The loss interrupted {disturbed.counts.interrupted}"
        f" completions and ended {disturbed.faults} rollouts; {figures['cpu_s']} CPU seconds"
    )


if __name__ == "__main__":
    main()
