"""The audit of images as the command runs it: fetched from where they lie, once for all tasks."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.support import needs, oci_layouts

from etude.envserver.tasks import audit

TEST = "from shop import total\n\n\ndef test_total():\n    assert total([1, None]) == 1\n"
FILES: Mapping[str, str] = {
    "instruction.md": "Fix it.\n",
    "environment/README": "the shop\n",
    "tests/test.sh": "if python3 -m pytest -q /tests/test_total.py; then r=1; else r=0; fi\n"
    "echo $r > /logs/verifier/reward.txt\n",
    "tests/test_total.py": TEST,
    "solution/solve.sh": "sed -i s/sum/total/ shop.py\n",
}


@pytest.fixture(autouse=True)
def _programs() -> None:
    needs.image_programs()


def write_task(folder: Path, image: str) -> None:
    settings = f'[metadata]\netude_image = "{image}"\n'
    for path, text in {"task.toml": settings, **FILES}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


@pytest.mark.parametrize("is_zstd", [False, True])
def test_each_task_of_an_image_is_told_what_its_layers_give_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, is_zstd: bool
) -> None:
    layout = tmp_path / "layout"
    base = [oci_layouts.file("app/shop.py", b"total = sum\n")]
    leak = [oci_layouts.file("app/tests/test_total.py", TEST.encode())]
    cleaned = [oci_layouts.removed("app/tests/test_total.py")]
    config = {"WorkingDir": "/app"}
    digest = oci_layouts.write_layout(layout, base, leak, cleaned, config=config, is_zstd=is_zstd)
    clean = oci_layouts.write_layout(layout, base, config=config, is_zstd=is_zstd)
    for name, image in (("a", digest), ("b", digest), ("c", clean)):
        write_task(tmp_path / "tasks" / name, f"{layout.as_uri()}@{image}")

    assert audit.main([str(tmp_path / "tasks"), "--json"]) == 0
    capsys.readouterr()
    assert audit.main([str(tmp_path / "tasks"), "--images", "--json"]) == 1

    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [bool(row["flaws"]) for row in rows] == [True, True, False]
    for row in rows[:2]:
        assert {flaw["rule"] for flaw in row["flaws"]} == {"shipped-answer"}
        assert all(flaw["where"].startswith("layer 2 of 3") for flaw in row["flaws"])
        assert all("/app/tests/test_total.py" in flaw["where"] for flaw in row["flaws"])


def test_an_image_that_cannot_be_had_is_a_flaw_of_its_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = tmp_path / "layout"
    oci_layouts.write_layout(layout, [oci_layouts.file("a")])
    write_task(tmp_path / "task", f"{layout.as_uri()}@sha256:{'0' * 64}")
    assert audit.main([str(tmp_path / "task"), "--images"]) == 1
    said = capsys.readouterr().out
    assert "cannot be looked at" in said
    assert "0 of 1 tasks have no known flaw" in said
