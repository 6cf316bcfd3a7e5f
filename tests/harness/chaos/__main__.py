"""make chaos-weights: the chain of versions under faults.

On a folder and on a real S3 server with engines of numpy, then a shorter one for two real engines.
"""

import argparse
import sys
from pathlib import Path

from tests.harness.chaos import result, runner
from tests.harness.chaos.engines import mutations as engine_mutations
from tests.harness.chaos.engines import run as engines
from tests.harness.chaos.mutations import MUTATIONS
from tests.harness.chaos.result import Result
from tests.support.stores import s3_servers

OUT = Path(__file__).parents[3] / "bench" / "out" / "chaos_weights.json"
VERSIONS, QUICK_VERSIONS = 1000, 60
STORES = ("folder", "minio", "moto")
ENGINES = "engines"
SEEDS = 6
"""Runs in which a broken check must be noticed at least once: their orders of events differ."""

BROKEN = (*MUTATIONS, *engine_mutations.MUTATIONS)


def main() -> int:
    """Run, print, write; 0 if everything passed."""
    options = _options()
    if options.mutation:
        return 0 if _is_noticed(options.mutation, options) else 1
    stores = [options.store] if options.store else ["folder", _s3(), ENGINES]
    results = []
    for store in stores:
        results.append(_run(store, options))
        _show(results[-1])
        result.write(options.out, results, {})
    noticed = {}
    for name in BROKEN if options.mutations else ():
        noticed[name] = _is_noticed(name, options)
        result.write(options.out, results, noticed)
    sound = not any(each.failures or each.too_few for each in results)
    return 0 if sound and all(noticed.values()) else 1


def say(line: str) -> None:
    """One line for whoever watches."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.harness.chaos", description=__doc__)
    parser.add_argument("--versions", type=int, help=f"{VERSIONS}; {engines.VERSIONS} with engines")
    parser.add_argument("--seed", type=int, default=0)
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--store", choices=STORES, help="only this one")
    only.add_argument(
        "--engines", dest="store", action="store_const", const=ENGINES, help="only the real ones"
    )
    only.add_argument("--mutation", choices=BROKEN, help="only break this one, on a folder")
    parser.add_argument("--quick", action="store_true", help="few versions")
    parser.add_argument("--mutations", action="store_true", help="break each check afterwards, too")
    parser.add_argument("--out", type=Path, default=OUT, help="the figures as JSON")
    parser.add_argument("--keep", type=Path, help="a folder for the journals")
    return parser.parse_args()


def _s3() -> str:
    if s3_servers.minio_binary().exists():
        return "minio"
    say("there is no MinIO server (`make minio` builds one): the emulator takes its place")
    return "moto"


def _run(store: str, options: argparse.Namespace) -> Result:
    few, many = QUICK_VERSIONS, VERSIONS
    if store == ENGINES:
        few, many = engines.QUICK_VERSIONS, engines.VERSIONS
    versions = options.versions or (few if options.quick else many)
    keep = options.keep and options.keep / store
    if store == ENGINES:
        return engines.run(versions=versions, seed=options.seed, quick=options.quick, keep=keep)
    return runner.run(store, versions=versions, seed=options.seed, keep=keep)


def _show(found: Result) -> None:
    say(f"{found.store}: {found.line()}")
    say(found.table())
    say(f"  in {found.seconds:.0f} s, {found.passes} states served")
    for failure in [*found.failures[:30], *(f"too few: {each}" for each in found.too_few)]:
        say(f"  FAILED {failure}")


def _is_noticed(name: str, options: argparse.Namespace) -> bool:
    """Whether a run without one check fails, as it must; the faults of one seed may all miss it."""
    for seed in range(options.seed, options.seed + SEEDS):
        if name in engine_mutations.MUTATIONS:
            versions = engine_mutations.MUTATIONS[name].versions
            broken = engines.run(versions=versions, seed=seed, mutation=name)
        else:
            versions = MUTATIONS[name].versions
            broken = runner.run("folder", versions=versions, seed=seed, mutation=name)
        failures = broken.failures
        say(f"broken: {name}, seed {seed}: {len(failures)} failures, {(failures or ['NONE'])[0]}")
        if failures:
            return True
    return False


if __name__ == "__main__":
    sys.exit(main())
