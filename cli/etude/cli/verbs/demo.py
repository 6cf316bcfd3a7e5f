"""`etude demo`: the whole platform on one machine, in minutes."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from etude.cli import runs
from etude.cli.demo.driver import DemoDriver
from etude.cli.output import Exit, console, say
from etude.cli.verbs.records.audit import audit_folder
from etude.cli.verbs.report import write_report
from etude.cli.verbs.run import follow_run


def demo(
    *,
    seed: Annotated[
        int, typer.Option(help="Data, tasks, weights and order follow_run from it.")
    ] = 0,
    folder: Annotated[Path | None, typer.Option("--dir", help="Run folder; runs/demo.")] = None,
    driver: Annotated[
        DemoDriver, typer.Option(help="What environments are; Auto: microVMs where they are fast.")
    ] = DemoDriver.AUTO,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Change a field: spec.path=value.")
    ] = None,
    plain: Annotated[bool, typer.Option(help="Lines instead of a picture.")] = False,
) -> None:
    """Warm a small policy up, train it with reinforcement learning, and show that it got better."""
    from etude.cli.demo import driver as demo_driver
    from etude.cli.demo import inputs
    from etude.cli.demo.stopwatch import record_session
    from etude.cli.process_usage import ResourceLog

    started_s = time.time()
    target = folder or runs.ROOT / ("demo" if seed == 0 else f"demo-{seed}")
    inputs.prepare_inputs(target, seed)
    seeds = [f"spec.model.seed={seed}"]
    seeds += [f"spec.phases.{index}.seed={seed}" for index in range(3)]
    changes = [*seeds, *demo_driver.driver_settings(driver), *(settings or [])]
    runtime = runs.start_runtime(inputs.find_manifest(), target, changes)
    if runs.await_state(runtime) is not None:
        record_session(target, "started", started_s)
        memory = ResourceLog(target, runtime.process.pid)
        again = f"etude demo --seed {seed} --dir {target}"
        code = follow_run(runtime, as_lines=plain, on_look=memory.measure, again=again)
        record_session(target, "ended", time.time())
        if code:
            raise SystemExit(code)
    _show(target)


def _show(folder: Path) -> None:
    from etude.cli.demo.result import IncompleteRecordError, measure_demo
    from etude.cli.demo.stopwatch import read_stopwatch
    from etude.cli.process_usage import read_measurements
    from etude.common.run_folder.record import FolderRecord, latest_rows

    record = FolderRecord(folder)
    rows = latest_rows(record.rows())
    _print_habits(folder, rows)
    say(f"report: {write_report(folder)}")
    account = audit_folder(folder)
    seen = read_measurements(folder)
    signs = [float(row["time_s"]) for row in (*record.rows(), *seen)]
    try:
        result = measure_demo(
            rows,
            times=read_stopwatch(folder, signs),
            lost=account["lost"] + len(account["findings"]),
            peak_rss_gib=max((look["total"]["pss_bytes"] for look in seen), default=0) / 2**30,
        )
    except IncompleteRecordError as error:
        say(f"cannot be judged: {error}")
        raise SystemExit(Exit.NO) from error
    (folder / "demo.json").write_text(json.dumps(asdict(result), indent=2) + "\n", encoding="utf-8")
    misses = result.misses()
    for miss in misses:
        say(f"missed: {miss}")
    for delay in result.delays():
        say(f"slow: {delay}")
    console().print(result.summary(), soft_wrap=True)
    if misses:
        raise SystemExit(Exit.NO)


def _print_habits(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    from etude.cli.report.page import habits

    facts = json.loads((folder / "inputs/etude/demo/facts.json").read_text())
    say(f"the demonstrators themselves succeed in {facts['demonstrators_success']:.2f}")
    grid = habits(rows)
    if grid is None:
        return
    table = Table("habit on held-out tasks", *grid.columns, box=None, pad_edge=False)
    for line in grid.rows:
        table.add_row(line.label, *line.values)
    console(to_stderr=True).print(table)
