"""`etude plan`: the memory of a run's learner, before it has a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from etude.cli.output import Exit, console, print_row, print_whole, say
from etude.cli.verbs.model import open_model
from etude.cli.verbs.options import AsJson
from etude.common.errors import Problem, UserError

if TYPE_CHECKING:
    from etude.common.api.run.spec import RLRunSpec

USABLE = 0.9
"""Share of a device's memory for tensors: the rest is for the CUDA context, the buffers of NCCL and
cuBLAS, and gaps between tensors; on a host for all that is no tensor."""
DEFAULT_GPU_GIB = 80.0
GPU_MEMORY_LABEL = "nvidia.com/gpu.memory"
"""Of nodes, in MiB, written by NVIDIA's GPU feature discovery."""


def plan(
    file: Annotated[Path, typer.Argument(metavar="MANIFEST", help="File with one RLRun.")],
    *,
    model: Annotated[
        str | None,
        typer.Option(help="Model, if spec.model.uri cannot be reached from here: folder or URI."),
    ] = None,
    gpu_gib: Annotated[
        float | None,
        typer.Option(
            min=1.0,
            help=f"Memory of a GPU; the node selector's {GPU_MEMORY_LABEL}, or"
            f" {DEFAULT_GPU_GIB:.0f}, unless given.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show how much memory each learner rank needs, and what to change if that is too much.

    The learner's own step runs on tensors without values: no GPU, no weights, little memory. Of the
    model only config.json is read. The answer is no, with exit code 1, if a phase does not fit.
    """
    spec = _read_spec(file)
    total_gib = gpu_gib or _memory_gib(spec)
    limit_gib, pod_limit_gib = USABLE * total_gib, _pod_limit_gib(spec)
    phases = _plan_phases(spec, model, limit_gib)
    for phase in phases:
        phase.update(limitGib=limit_gib, podLimitGib=pod_limit_gib)
        for planned in (phase, *phase["changes"]):
            fits_pod = pod_limit_gib is None or planned["podGib"] <= pod_limit_gib
            planned["fits"] = fits_pod and planned["peakGib"] <= limit_gib
        if as_json:
            print_row(phase)
        else:
            _print_phase(phase, total_gib)
    if not all(phase["fits"] for phase in phases):
        raise SystemExit(Exit.NO)


def _read_spec(file: Path) -> "RLRunSpec":
    from etude.common.api.lint.linter import lint_file
    from etude.common.api.run.spec import RLRunSpec
    from etude.common.api.yaml_documents import parse_documents, read_bounded

    if not file.is_file():
        raise UserError(Problem("NotFound", "no such file", str(file), "check the path"))
    findings = lint_file(file)
    if findings:
        for finding in findings:
            say(finding.text())
        raise SystemExit(Exit.INVALID)
    values = [document.value for document in parse_documents(read_bounded(file))]
    runs = [v for v in values if isinstance(v, dict) and v.get("kind") == "RLRun"]
    if len(runs) != 1:
        what = f"holds {len(runs)} objects of kind RLRun"
        raise UserError(Problem("InvalidSpec", what, str(file), "name a file with one run"))
    return RLRunSpec.model_validate(runs[0]["spec"])


def _memory_gib(spec: "RLRunSpec") -> float:
    """Memory of a rank: its GPU's, or its share of the pod's, or of this machine's, on a CPU."""
    trainer = spec.roles.trainer
    if trainer.has_gpus:
        label = trainer.node_selector.get(GPU_MEMORY_LABEL, "")
        return int(label) / 1024 if label.isdecimal() and int(label) else DEFAULT_GPU_GIB
    own = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return (trainer.memory_bytes or own) / trainer.ranks_per_pod / (1 << 30)


def _pod_limit_gib(spec: "RLRunSpec") -> float | None:
    """Memory for tensors in a pod whose ranks have GPUs; None if it is not known."""
    memory = spec.roles.trainer.memory_bytes if spec.roles.trainer.has_gpus else None
    return None if memory is None else USABLE * memory / (1 << 30)


def _plan_phases(spec: "RLRunSpec", model: str | None, limit_gib: float) -> list[dict[str, Any]]:
    """Ask a process of the trainer's part, which has torch."""
    from etude.common.model_sources.files import CONFIG

    uri = model or spec.model.uri
    if uri is None:
        what = "the model of a checkpoint is known to the operator alone"
        where, fix = "spec.model.checkpointRef", "name a folder with the model: --model"
        raise UserError(Problem("Usage", what, where, fix))
    source = open_model(uri, spec.storage.endpoint, spec.storage.region, with_digests=False)
    config = next((file for file in source.files if file.name == CONFIG), None)
    with TemporaryDirectory(prefix="etude-plan-") as folder:
        if config is not None:
            (Path(folder) / CONFIG).write_bytes(source.read(config, 0, config.size))
        done = subprocess.run(
            [
                *(sys.executable, "-m", "etude.trainer.commands.plan_memory", folder),
                *("--limit-gib", str(limit_gib)),
            ],
            input=spec.model_dump_json(by_alias=True, exclude_none=True),
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
    if done.returncode:
        raise SystemExit(done.returncode)
    return [json.loads(line) for line in done.stdout.splitlines()]


def _print_phase(phase: dict[str, Any], total_gib: float) -> None:
    ranks = phase["shard"] * phase["replicate"]
    copies = f" in {phase['replicate']} copies" if phase["replicate"] > 1 else ""
    split = f" over {phase['context']} ranks" if phase["context"] > 1 else ""
    console().print(
        f"phase {phase['phase']}: {ranks} rank{'s' if ranks > 1 else ''}{copies},"
        f" passes of {phase['tokens']:,} tokens{split} on a {phase['device']}"
    )
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 2))
    table.add_column()
    table.add_column(justify="right")
    for name, size in phase["parts"].items():
        table.add_row(name, f"{size:,.1f} GiB")
    table.add_row("peak", f"{phase['peakGib']:,.1f} GiB")
    print_whole(table)
    verdict = _describe_fit(phase["peakGib"], phase["limitGib"])
    console().print(f"  {verdict}, {USABLE:.0%} of {total_gib:,.0f} GiB")
    if phase["podGib"]:
        _print_pod(phase)
    for change in phase["changes"]:
        saved = phase["peakGib"] - change["peakGib"]
        console().print(
            f"  {change['change']}: {change['peakGib']:,.1f} GiB, {saved:,.1f} less"
            f"{', fits' if change['fits'] else ''}",
            soft_wrap=True,
        )


def _print_pod(phase: dict[str, Any]) -> None:
    """Print the memory of the host that the ranks of a pod need."""
    ranks, limit_gib = phase["ranksPerPod"], phase["podLimitGib"]
    text = f"  beside it, {phase['podGib']:,.1f} GiB of the host for the {ranks} ranks of a pod"
    if limit_gib is not None:
        text += (
            f": {_describe_fit(phase['podGib'], limit_gib)}, {USABLE:.0%} of roles.trainer.memory"
        )
    console().print(text, soft_wrap=True)


def _describe_fit(needed_gib: float, limit_gib: float) -> str:
    return f"{'fits' if needed_gib <= limit_gib else 'does not fit'} into {limit_gib:,.1f} GiB"
