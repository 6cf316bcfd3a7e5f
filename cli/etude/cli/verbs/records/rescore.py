"""`etude rescore`: recorded rollouts get rewards by another rubric too."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from etude.cli import runs
from etude.cli.local_services import LocalServices, local_services
from etude.cli.output import Exit, print_row, say
from etude.cli.resolved_run import resolve_run
from etude.cli.verbs.options import AsJson, RunFolder
from etude.common.errors import Problem, UserError

if TYPE_CHECKING:
    from etude.common.run_folder.state import LocalState

Object = dict[str, Any]

LOST = 1
"""Exit code of the program if the platform lost some rollouts."""


def rescore(  # noqa: PLR0913 - its options
    run: RunFolder,
    *,
    rewards: Annotated[
        Path, typer.Option(help="YAML with `functions`, or a manifest of a run with the rubric.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder of the results; rescored/RUN unless given.")
    ] = None,
    first_step: Annotated[int, typer.Option(min=1, help="Counted over all phases.")] = 1,
    last_step: Annotated[int | None, typer.Option(min=1, help="The newest unless given.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Groups at most.")] = None,
    parallel: Annotated[int, typer.Option(min=1, help="Groups at a time.")] = 2,
    as_json: AsJson = False,
) -> None:
    """Score trained rollouts again with another rubric; the run itself is not changed.

    The calls of each rollout are repeated on the first files of its task, in an environment of the
    run's pools that is started here, and must have the results that the policy read. The change is
    then graded in another environment, as in training. Results are rollouts.jsonl with the old and
    the new reward of each, and summary.json; the same command goes on where it was stopped.
    """
    folder = runs.folder_of(run)
    state, resolved = resolve_run(folder)
    role = resolved["spec"]["roles"].get("rewards") or {}
    resolved["spec"]["roles"]["rewards"] = role | {"functions": read_functions(rewards)}
    job: Object = {
        "run": resolved,
        "results": str((out or Path("rescored") / folder.resolve().name).resolve()),
        "firstStep": first_step,
        "parallel": parallel,
    }
    given = {"lastStep": last_step, "limit": limit}
    job |= {name: value for name, value in given.items() if value is not None}
    with (
        tempfile.TemporaryDirectory(prefix="etude-rescore-") as scratch,
        local_services(Path(scratch)) as services,
    ):
        job |= _start_services(services, state, resolved)
        code = _run(job, Path(scratch), as_json=as_json)
    if code == LOST:
        say("run the same command again for those that were lost")
    if code:
        raise SystemExit(Exit.INVALID if code == Exit.INVALID else Exit.NO)
    say(f"results: {job['results']}")


def read_functions(path: Path) -> list[Object]:
    """The rubric in a file: of its `functions`, or of the run in it.

    Raises:
        UserError: there is no such file, or no valid rubric in it.
    """
    from pydantic import ValidationError

    from etude.common.api import yaml_documents
    from etude.common.api.run.roles import RewardsRole

    fix = "give functions as roles.rewards of a run has them"
    try:
        values = [
            each.value for each in yaml_documents.parse_documents(yaml_documents.read_bounded(path))
        ]
        candidates = [found for value in values if (found := _find_functions(value)) is not None]
        if len(candidates) != 1:
            what = f"has {len(candidates)} rubrics, not one"
            raise UserError(Problem("InvalidSpec", what, str(path), fix))
        role = RewardsRole.model_validate({"functions": candidates[0]})
    except ValidationError as cause:
        first = cause.errors(include_input=False, include_url=False)[0]
        where = f"{path}: {'.'.join(map(str, first['loc'])) or 'functions'}"
        raise UserError(Problem("InvalidSpec", first["msg"], where, fix)) from cause
    except (OSError, yaml_documents.InvalidYamlError) as cause:
        raise UserError(Problem("InvalidSpec", str(cause), str(path), fix)) from cause
    return [each.to_json() for each in role.functions]


def _find_functions(document: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Functions in a document; None if it has none."""
    match document:
        case {"functions": functions}:
            return functions
        case {"kind": "RLRun", "spec": {"roles": {"rewards": {"functions": functions}}}}:
            return functions
        case _:
            return None


def _start_services(services: LocalServices, state: "LocalState", resolved: Object) -> Object:
    """Start pools of the run and a reward service; returns their addresses.

    Raises:
        UserError: one does not start.
    """
    brokers = {}
    for role in resolved["spec"]["roles"].get("environments", ()):
        name = role["name"]
        pool_file = services.folder / f"pool-{name}.json"
        pool_file.write_text(json.dumps(_find_pool(role, state, resolved)), encoding="utf-8")
        variables = {"ETUDE_POOL_FILE": str(pool_file)}
        say(f"starting environments {name}")
        broker = services.start(f"broker-{name}", ["etude.envserver.main", "broker"], variables)
        variables["ETUDE_BROKER_TARGET"] = brokers[name] = broker
        services.start(f"node-{name}", ["etude.envserver.main", "node"], variables)
    run_file = services.folder / "run.json"
    run_file.write_text(json.dumps(resolved), encoding="utf-8")
    variables = {"ETUDE_RUN_FILE": str(run_file), "ETUDE_BROKERS": json.dumps(brokers)}
    rewards = services.start("rewards", ["etude.rewards.main"], variables)
    return {"brokers": brokers, "rewards": rewards}


def _find_pool(role: Mapping[str, Any], state: "LocalState", resolved: Object) -> Object:
    """The pool of an environment, as its processes read it.

    Raises:
        UserError: the folder has no pool of that name.
    """
    name = role.get("poolRef", f"{resolved['name']}-{role['name']}")
    template = role.get("poolTemplate")
    if template is not None:
        access = {k: v for k, v in resolved["spec"]["storage"].items() if k != "uri"}
        return {"name": name, "uid": name, "spec": ({"store": access} if access else {}) | template}
    pools: list[Any] = list(state.pools)
    for pool in pools:
        if pool["metadata"]["name"] == name:
            return {"name": name, "uid": name, "spec": pool["spec"]}
    fix = "give the folder of a run that had this pool"
    raise UserError(Problem("NotFound", f"has no pool {name}", f"environment {role['name']}", fix))


def _run(job: Object, scratch: Path, *, as_json: bool) -> int:
    """Run the program of a job, show its progress, and return its exit code."""
    file = scratch / "job.json"
    file.write_text(json.dumps(job), encoding="utf-8")
    command = [sys.executable, "-m", "etude.trainer.commands.rescore", str(file)]
    with (scratch / "errors").open("w+b") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)

        def stop(_number: int, _frame: FrameType | None) -> None:
            process.terminate()

        with runs.handle_stop_signals(stop):
            for line in process.stdout or ():
                _show(json.loads(line), as_json=as_json)
            code = process.wait()
        errors.seek(0)
        problem = errors.read().decode(errors="replace").strip()
    if code not in {0, LOST}:
        say(problem)
    return code


def _show(row: Object, *, as_json: bool) -> None:
    if as_json:
        print_row(row)
    elif "groups" in row:
        counts = f"{row['scored']} rollouts scored, {row['left_out']} left out, {row['lost']} lost"
        say(f"{row['groups']} of {row['of']} groups: {counts}")
    else:
        found = row["summary"]
        say(
            f"mean reward {found['old_reward_mean']:.4f} → {found['new_reward_mean']:.4f},"
            f" {found['changed']} of {found['scored']} changed"
        )
        say(f"rank correlation {describe_correlation(found)}")
        if missing := found["missing"]:
            say(f"calls gone from the store, or damaged: {', '.join(missing)}")
        if found["sibling_pairs_reversed"] is not None:
            share = 100 * found["sibling_pairs_reversed"]
            say(f"pairs of siblings in another order: {share:.1f} %")


def describe_correlation(found: Mapping[str, Any]) -> str:
    """The rank correlation of a summary, with its interval."""
    if found["rank_correlation"] is None:
        return "unknown: the old or the new rewards are all equal"
    low, high = found["rank_correlation_95"]
    return f"{found['rank_correlation']:.3f} (95 %: {low:.3f} to {high:.3f})"
