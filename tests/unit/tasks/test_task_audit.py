"""Audit of tasks, without running anything."""

import re
from pathlib import Path

import pytest

from etude.envserver.tasks import audit

GOOD = {
    "task.toml": 'schema_version = "1.1"\n',
    "instruction.md": "Fix it.\n",
    "environment/shop.py": "x = 1\n",
    "tests/test.sh": "if python3 -m pytest -q /tests/test_shop.py; then r=1; else r=0; fi\n"
    "echo $r > /logs/verifier/reward.txt\n",
    "tests/test_shop.py": "from shop import x\n\n\ndef test_x():\n    assert x == 2\n",
    "solution/solve.sh": "echo 'x = 2' > shop.py\n",
}
FLAWS = {
    "shared-sandbox": {"tests/test.sh": "bash ./check.sh && echo 1 0 > reward.txt\n"},
    "shipped-answer": {"environment/.bash_history": "vi shop.py\n"},
    "evaluated-input": {"tests/test_shop.py": "assert eval(open('answer').read()) == 2\n"},
    "judge-without-guard": {"tests/judge.py": "import openai\n"},
    "weak-match": {"tests/test.sh": "python3 shop.py | grep -q 2; echo $? 0 > reward.txt\n"},
    "cannot-fail": {"tests/test_shop.py": "def test_x():\n    pass\n"},
    "trusted-output": {"tests/test.sh": "PYTHONPATH=. pytest /tests; echo 0 > reward.txt\n"},
    "broad-rights": {"task.toml": 'schema_version = "1.1"\n[metadata]\netude_allowed = ["**"]\n'},
}


def written(folder: Path, **changes: str) -> Path:
    for path, text in (GOOD | changes).items():
        target = folder / "task-1" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return folder / "task-1"


def test_a_sound_task_has_no_flaw(tmp_path: Path) -> None:
    assert audit.audit_task(written(tmp_path)).flaws == ()


@pytest.mark.parametrize("rule", FLAWS)
def test_each_class_of_flaws_is_found(tmp_path: Path, rule: str) -> None:
    assert {*FLAWS} == {*audit.RULES}
    found = audit.audit_task(written(tmp_path, **FLAWS[rule])).flaws
    assert rule in {flaw.rule for flaw in found}, found


def test_a_copy_of_a_hidden_file_is_a_shipped_answer(tmp_path: Path) -> None:
    folder = written(tmp_path, **{"environment/old.py": GOOD["tests/test_shop.py"]})
    assert [flaw.where for flaw in audit.audit_task(folder).flaws] == ["old.py"]


def test_cleaning_removes_what_was_left(tmp_path: Path) -> None:
    folder = written(tmp_path, **FLAWS["shipped-answer"])
    assert audit.main([str(folder)]) == 1
    assert audit.main([str(folder), "--clean", "--json"]) == 0
    assert not (folder / "environment/.bash_history").exists()


def test_the_page_has_every_class() -> None:
    page = Path(__file__).parents[3] / "docs/how-to/write-a-task.md"
    table = page.read_text().partition("## Audit")[2]
    assert {*audit.RULES} <= {*re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE)}


def test_credentials_without_images_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit.main([str(tmp_path), "--credentials", "config.json"]) == 2
    assert "add --images" in capsys.readouterr().err
