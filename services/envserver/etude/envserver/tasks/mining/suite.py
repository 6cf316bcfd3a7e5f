"""Test suite of a repository, run in sandboxes."""

import importlib.resources
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from etude.common.errors import Problem, UserError
from etude.envserver.drivers.base import Verification
from etude.envserver.storage.trees import File, Tree
from etude.envserver.tasks.formats import swebench
from etude.envserver.tasks.runner import TaskRunner

_REPORT = "/logs/report.z"
_MAX_REPORT_BYTES = 32 << 20
_PASSED = frozenset({"PASSED", "XFAIL"})


class SuiteReport(BaseModel):
    """Results of one run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    statuses: Mapping[str, str]
    """Status of each test, by its name."""
    exit_code: int
    seconds: float = Field(ge=0)
    errors: Mapping[str, int]
    """Number of lines of the log that begin with an error, by its class."""
    tail: str
    """End of the log."""

    @property
    def passing_tests(self) -> frozenset[str]:
        return frozenset(name for name, status in self.statuses.items() if status in _PASSED)

    @property
    def is_green(self) -> bool:
        """True if tests ran and none failed."""
        failed = {"FAILED", "ERROR"} & {*self.statuses.values()}
        return self.exit_code == 0 and bool(self.passing_tests) and not failed


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteRunner:
    """Runs one suite on different files."""

    runner: TaskRunner
    image: str
    """Image that the suite needs; empty where any will do."""
    template: str
    """Driver's name of the template of that image."""
    command: str
    log_form: str
    timeout_s: float

    async def run(self, files: Tree, timeout_s: float | None = None) -> SuiteReport | None:
        """Run the suite; None if it did not end in time or left no report.

        Raises:
            SandboxError: the platform failed.
        """
        probe = importlib.resources.files(__package__).joinpath("suite_probe.py").read_bytes()
        settings = json.dumps({"command": self.command, "log": self.log_form}).encode()
        tests = {"probe.py": File(probe), "suite.json": File(settings)}
        tests |= swebench.grader_files(self.log_form)
        outcome = await self.runner.driver.verify(
            Verification(
                template=self.template,
                workspace=files,
                tests=tests,
                command="python3 /tests/probe.py",
                timeout_s=timeout_s or self.timeout_s,
                reward_path=_REPORT,
            )
        )
        return None if outcome.timed_out else _parse_report(outcome.collected or b"")


def _parse_report(data: bytes) -> SuiteReport | None:
    """The report in bytes that the repository's code may have written."""
    try:
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(data, _MAX_REPORT_BYTES)
        return SuiteReport.model_validate_json(text)
    except (zlib.error, ValidationError):
        return None


def require_green(report: SuiteReport | None, command: str) -> SuiteReport:
    """Check the suite of the unchanged repository.

    Raises:
        UserError: it does not pass; the message names failed tests, or the end of the log.
    """
    if report is not None and report.is_green:
        return report
    if report is None:
        what = "did not end in time, or left no report"
    else:
        failed = [name for name, status in report.statuses.items() if status in {"FAILED", "ERROR"}]
        shown = ", ".join(failed[:3]) or f"no test ran: …{report.tail[-400:]!r}"
        what = f"ended with {report.exit_code}; {len(failed)} tests fail: {shown}"
    fix = (
        "sandboxes have no network: add what the tests need with --with or --image, "
        "or give a --test-command that passes"
    )
    raise UserError(Problem("SuiteNotGreen", what, f"the suite ({command})", fix))
