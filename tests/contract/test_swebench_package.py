"""Our reading of logs and our verdicts against the benchmark's own package."""

import itertools
import random

from tests.support.oracles import Oracle

from etude.envserver.tasks.formats.swebench_grader import is_solved, statuses

SWEBENCH = Oracle(requirements=("swebench==5.0.2",), is_alone=True)
SCRIPT = """
import importlib.util, json, pathlib, sys, types
root = pathlib.Path(importlib.util.find_spec("swebench").origin).parent.parent
for name in ("swebench", "swebench.harness"):  # whose __init__ imports container engines
    module = types.ModuleType(name)
    module.__path__ = [str(root / name.replace(".", "/"))]
    sys.modules[name] = module
utils = types.ModuleType("swebench.utils")
utils.ansi_escape = lambda text: text
sys.modules["swebench.utils"] = utils
from swebench.harness import grading
from swebench.harness.log_parsers.python import parse_log_pytest_v2
for line in sys.stdin:
    given = json.loads(line)
    found = parse_log_pytest_v2(given["log"], None)
    listed = {"FAIL_TO_PASS": given["repaired"], "PASS_TO_PASS": given["kept"]}
    report = grading.get_eval_tests_report(found, listed)
    solved = grading.get_resolution_status(report) == "RESOLVED_FULL"
    print(json.dumps({"found": found, "solved": solved}))
"""
_NAMES = (
    *(
        "tests/test_a.py::test_one",
        "tests/test_a.py::TestX::test_two",
        "tests/test_a.py::test_p[1]",
    ),
    *("tests/test_a.py::test_p[a b]", "tests/test_a.py::test_p[a c]", "tests/b/test_c.py::test_d"),
)
_STATUSES = ("PASSED", "FAILED", "ERROR", "XFAIL", None)


def _log(found: dict[str, str | None]) -> str:
    lines = ["collected 6 items", "tests/test_a.py ..F", "= short test summary info ="]
    for name, status in found.items():
        if status is not None:
            lines.append(f"{status} {name}" + (" - because" if status == "FAILED" else ""))
    return "\n".join([*lines, "SKIPPED [1] tests/test_a.py:3: why", "= 1 passed in 0.1s ="]) + "\n"


def test_verdicts_agree_with_the_package_on_every_kind_of_log() -> None:
    draw = random.Random(7)
    cases = []
    for first, second in itertools.product(_STATUSES, repeat=2):
        for _ in range(6):
            found = dict(zip(_NAMES, draw.choices(_STATUSES, k=len(_NAMES)), strict=True))
            found |= {_NAMES[0]: first, _NAMES[1]: second}
            cut = draw.choice(["tests/test_a.py::test_p[a", _NAMES[2], _NAMES[5]])
            repaired, kept = [_NAMES[0]], [_NAMES[1], cut]
            cases.append({"log": _log(found), "repaired": repaired, "kept": kept})
    cases += [{**case, "kept": case["kept"][:1]} for case in cases]
    answers = SWEBENCH.answers(SCRIPT, cases)
    assert len(answers) == len(cases)
    for case, answer in zip(cases, answers, strict=True):
        read = statuses(str(case["log"]))
        assert read == answer["found"]
        solved = is_solved(
            read, fail_to_pass=case["repaired"], pass_to_pass=case["kept"], exit_code=0
        )
        assert solved is answer["solved"]
    assert {answer["solved"] for answer in answers} == {True, False}
