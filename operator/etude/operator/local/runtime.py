"""The local runtime: runs one RLRun, or one EvalRun of its checkpoint, as processes of this host.

SIGINT or SIGTERM saves a checkpoint and stops; a second one stops immediately; the same command
resumes. Exit code 0: complete; 1: failed; 2: bad --set; 4: invalid manifest; 8: the folder is in
use or has another run; 70: a bug, in the log; 130: stopped before its end.
"""

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from etude.common.api import yaml_documents
from etude.common.api.lint.linter import lint_bytes
from etude.common.errors import Problem, UserError
from etude.common.run_folder.state import IMAGES_VARIABLE, images_folder
from etude.operator.builders.platform import Platform
from etude.operator.clock import SystemClock
from etude.operator.controller.operator import open_operator
from etude.operator.controller.status_writer import StatusDebounce
from etude.operator.local import localize, run_folder
from etude.operator.local.localize import Object
from etude.operator.local.process_cluster import ProcessCluster, ProcessKubelet, process_cluster
from etude.operator.local.state_files import StateFiles
from etude.operator.manifests import Manifest, condition, is_true, ref
from etude.operator.reasons import Reason
from etude.operator.remotes.clients import GrpcRemoteClient

log = logging.getLogger("etude.operator.local")

EXIT_FAILED = 1
EXIT_INVALID = 4
EXITS = {"Usage": 2, "Conflict": 8}
"""Exit codes by reason; every other problem is an invalid manifest."""
EXIT_BUG = 70
EXIT_STOPPED = 130

SUBJECTS = ("RLRun", "EvalRun")
"""Kinds that a runtime runs to their end."""
IMAGES = ("trainer", "inference", "rewards", "envserver", "operator")
STATUS_DEBOUNCE_S = 0.5
LAST_JOBS_S = 60.0
"""Longest wait for the verification of checkpoints, which takes a second or two."""


@dataclass(slots=True)
class LocalRuntime:
    """One run on this host, or one evaluation in the folder of a run."""

    folder: Path
    subject: Manifest
    """The RLRun or EvalRun whose end is awaited."""
    run: Manifest
    """The run of the folder."""
    others: Sequence[Manifest]
    base_env: Mapping[str, str]
    """Environment that its processes inherit."""
    _signals: int = 0
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self) -> int:
        """Run to the end or to a signal; returns the exit code."""
        async with ProcessKubelet(folder=self.folder, base_env=self.base_env) as kubelet:
            cluster = process_cluster(kubelet)
            state_files = StateFiles(self.folder, os.getpid(), cluster, kubelet, ref(self.run))
            cluster.subscribe(lambda manifest: self._news.set())
            self._restore(cluster)
            code = await self._operate(cluster, kubelet, state_files)
        state_files.write()
        return code

    def _restore(self, cluster: ProcessCluster) -> None:
        known = run_folder.load_objects(self.folder)
        for manifest in known:
            if not self._is_abandoned(manifest):
                cluster.upsert(manifest)
        for manifest in (*self.others, self.run, self.subject):
            cluster.upsert(manifest)
        _warn_of_weak_isolation(self.run, self.others)

    def _is_abandoned(self, manifest: Manifest) -> bool:
        """An evaluation that was stopped, and is not the one that is started now."""
        is_over = any(is_true(manifest, kind) for kind in ("Complete", "Failed"))
        is_other = ref(manifest) != ref(self.subject)
        return manifest["kind"] == "EvalRun" and is_other and not is_over

    async def _operate(
        self, cluster: ProcessCluster, kubelet: ProcessKubelet, state_files: StateFiles
    ) -> int:
        clock = SystemClock()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupted, cluster, kubelet)
        platform = Platform(
            images=dict.fromkeys(IMAGES, "local"),
            has_shared_files=True,
            allows_weak_isolation=True,
            traces_file=str(self.folder / "traces.jsonl"),
        )
        running = open_operator(
            cluster,
            GrpcRemoteClient(),
            platform,
            clock,
            instance="local",
            debounce=StatusDebounce(STATUS_DEBOUNCE_S),
        )
        async with running as made, asyncio.TaskGroup() as tasks:
            helpers = [
                tasks.create_task(made.run(), name="operator"),
                tasks.create_task(state_files.keep_writing(), name="state-files"),
            ]
            outcome = await self._outcome(cluster)
            for helper in helpers:
                helper.cancel()
        return self._exit_code(cluster, outcome)

    async def _outcome(self, cluster: ProcessCluster) -> str | None:
        """Wait for the outcome of the run; None after a second signal."""
        outcome = None
        # An evaluation has nothing to save.
        most = 2 if self.subject is self.run else 1
        while outcome is None and self._signals < most:
            self._news.clear()
            outcome = run_folder.run_outcome(cluster.get(ref(self.subject)) or {})
            if outcome is None:
                await self._news.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_JOBS_S):
                while self._signals < most and _has_work(cluster):
                    self._news.clear()
                    await self._news.wait()
        return outcome

    def _interrupted(self, cluster: ProcessCluster, kubelet: ProcessKubelet) -> None:
        self._signals += 1
        self._news.set()
        if self.subject is not self.run:
            log.info("stopping; the same command resumes the evaluation")
            return
        if self._signals > 1:
            log.warning("stopping at once; the next start resumes from the last checkpoint")
            kubelet.skip_grace()
            return
        log.info("saving a checkpoint, then stopping; a second signal stops at once")
        live = cluster.get(ref(self.run)) or self.run
        cluster.upsert({**self.run, "spec": {**live["spec"], "suspend": True}})

    def _exit_code(self, cluster: ProcessCluster, outcome: str | None) -> int:
        run = cluster.get(ref(self.subject)) or {}
        match outcome:
            case "Complete":
                log.info("complete: %s", run_folder.outcome_message(run))
                return 0
            case "Failed":
                log.error("failed: %s", run_folder.outcome_message(run))
                return EXIT_FAILED
            case "Suspended" if not self._signals:
                how = (
                    "--set spec.suspend=false" if run["spec"].get("suspend") else "the same command"
                )
                log.info("suspended: %s; %s resumes", run_folder.outcome_message(run), how)
                return EXIT_STOPPED
            case _:
                log.info("stopped; the same command resumes")
                return EXIT_STOPPED


def main() -> None:
    """Run one RLRun on this host."""
    parser = argparse.ArgumentParser(prog="python -m etude.operator.local", description=__doc__)
    parser.add_argument("--file", type=Path, required=True, help="manifest of one RLRun or EvalRun")
    parser.add_argument("--dir", type=Path, required=True, help="run folder")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    folder = options.dir.absolute()
    try:
        manifests = read_manifests(options.file, options.set)
        with run_folder.lock_folder(folder):
            code = _run(folder, manifests)
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        code = EXITS.get(error.problem.reason, EXIT_INVALID)
    except OSError as error:
        sys.stderr.write(f"{folder}: {error}\n  fix: give --dir a folder with space to write in\n")
        code = EXIT_FAILED
    except Exception:
        log.exception("the runtime failed; the same command resumes the run")
        code = EXIT_BUG
    sys.exit(code)


def read_manifests(file: Path, settings: Sequence[str]) -> list[Object]:
    """Read the objects of a manifest file, checked as by the API server.

    Raises:
        UserError: naming all errors.
    """
    try:
        data = yaml_documents.read_bounded(file)
        found = [document.value for document in yaml_documents.parse_documents(data)]
    except (OSError, yaml_documents.InvalidYamlError) as cause:
        raise UserError(
            Problem("InvalidYaml", str(cause), str(file), "give a readable YAML file")
        ) from cause
    objects = [value for value in found if isinstance(value, dict)]
    objects = [
        localize.apply_settings(value, settings) if value.get("kind") in SUBJECTS else value
        for value in objects
    ]
    # Rewritten only if settings changed it, so that positions in findings are those of the file.
    checked = yaml_documents.dump_documents(objects).encode() if settings else data
    findings = lint_bytes(checked, name=str(file))
    if findings:
        sys.stderr.write("".join(f"{finding.text()}\n" for finding in findings))
        count = len(findings)
        what = f"has {count} problem{'s' if count > 1 else ''}, listed above"
        raise UserError(Problem("InvalidSpec", what, str(file), f"etude lint {file}"))
    if sum(value.get("kind") in SUBJECTS for value in objects) != 1:
        what = "must contain exactly one RLRun or EvalRun, and may contain EnvPools"
        raise UserError(Problem("InvalidSpec", what, str(file), "split the file"))
    return objects


def _run(folder: Path, objects: list[Object]) -> int:
    local = [_with_namespace(localize.localize(value, folder)) for value in objects]
    subject = next(m for m in local if m["kind"] in SUBJECTS)
    others = [m for m in local if m is not subject]
    if subject["kind"] == "EvalRun":
        return _evaluate(folder, subject, others)
    before = run_folder.load_run(folder, subject)
    (folder / "run.yaml").write_text(yaml_documents.dump_documents(objects), encoding="utf-8")
    if before is not None and is_true(before, "Complete"):
        log.info("complete already: %s", run_folder.outcome_message(before))
        return 0
    return asyncio.run(LocalRuntime(folder, subject, subject, others, _base_env()).serve())


def _evaluate(folder: Path, evaluation: Manifest, others: Sequence[Manifest]) -> int:
    """Evaluate a checkpoint of the folder's run, which does not go on meanwhile."""
    run = run_folder.load_evaluated_run(folder)
    subject = localize.localize_evaluation(evaluation, run, folder)
    run_folder.refuse_changed_evaluation(folder, subject)
    return asyncio.run(LocalRuntime(folder, subject, run, others, _base_env()).serve())


def _with_namespace(value: Object) -> Manifest:
    manifest: Manifest = dict(value)
    metadata = manifest["metadata"]
    return {**manifest, "metadata": {"namespace": "default", **metadata}}


def _base_env() -> dict[str, str]:
    """Environment of roles: without ETUDE_ settings, with the virtual environment first in PATH.

    Images are the user's, while a role's home is its scratch folder.
    """
    env = {key: value for key, value in os.environ.items() if not key.startswith("ETUDE_")}
    env[IMAGES_VARIABLE] = str(images_folder())
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
    return env


def _has_work(cluster: ProcessCluster) -> bool:
    """Return true while a checkpoint is being verified or deleted."""
    facts = [condition(m, "Ready") for m in cluster.list_objects("Checkpoint")]
    return any(f.get("status") != "True" and f.get("reason") != Reason.CORRUPT for f in facts)


def _warn_of_weak_isolation(run: Manifest, others: Sequence[Manifest]) -> None:
    pools = {m["metadata"]["name"]: m["spec"] for m in others if m["kind"] == "EnvPool"}
    for role in run["spec"].get("roles", {}).get("environments") or ():
        if "poolTemplate" in role:
            pools[role["name"]] = role["poolTemplate"]
    for name, spec in pools.items():
        if spec.get("isolation", {}).get("minimum") == "Process":
            log.warning(
                "environments of %s are processes on this host's kernel (isolation Weak):"
                " run only tasks that you trust",
                name,
            )
