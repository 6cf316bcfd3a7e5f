"""Toolsets of installed packages: Etude's tools beside a team's own, under a name with a dot."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.installed_package import install_package
from tests.unit.agent.test_toolsets import SHOP, call

from etude.agent.tools.base import ErrorKind
from etude.agent.toolsets import run_calls, toolset
from etude.agent.workspace import Workspace
from etude.common.api.lint.linter import lint_text
from etude.common.api.run.rollout_policy import RolloutPolicy
from etude.common.errors import UserError

SOURCE = '''
from typing import ClassVar

from etude.agent.tools.base import Access, Tool, ToolOutcome
from etude.agent.toolsets import make_toolset, toolset


class CountLines(Tool):
    """Count the lines of a file."""

    access: ClassVar[Access] = Access.READ
    path: str
    """File below the current folder."""

    @property
    def target(self):
        return self.path

    async def run(self, workspace):
        data = await workspace.read(self.path)
        return ToolOutcome(content=f"{data.count(bytes([10]))} lines")



TOOLS = make_toolset(
    "acme.Counting", {**toolset("Compact").tools, "count_lines": CountLines}, max_calls=2
)
OTHER = {"count_lines": CountLines}
'''
ENTRIES = {
    "etude.toolsets": {"acme.Counting": "acme_tools:TOOLS", "acme.Other": "acme_tools:OTHER"}
}


@pytest.fixture(autouse=True)
def _package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_package(tmp_path, monkeypatch, name="acme_tools", source=SOURCE, entries=ENTRIES)


async def test_a_tool_of_a_package_runs_beside_those_of_etude(
    make_workspace: Callable[[dict[str, bytes]], Workspace],
) -> None:
    name = RolloutPolicy.model_validate({"toolset": "acme.Counting"}).toolset
    tools = toolset(name)
    assert '"name": "count_lines", "description": "Count the lines of a file."' in (
        tools.system_prompt
    )
    assert "finish" not in tools.system_prompt
    counted, read, late = await run_calls(
        tools,
        make_workspace(SHOP),
        [
            call("count_lines", path="shop/core.py"),
            call("read_file", path="shop/util.py"),
            call("count_lines", path="setup.cfg"),
        ],
    )
    assert counted.content == "2 lines"
    assert read.content == "def last(xs):\n    return xs[-1]"
    assert late.kind is ErrorKind.INVALID
    assert "at most 2 calls" in late.content


def test_a_package_that_registers_no_toolset_is_refused() -> None:
    with pytest.raises(UserError, match="is no Toolset but a dict"):
        toolset("acme.Other")
    with pytest.raises(UserError, match="is not installed"):
        toolset("acme.Absent")
    with pytest.raises(ValueError, match="should match pattern"):
        RolloutPolicy.model_validate({"toolset": "Standart"})


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("acme.Counting", "acme_tools:TOOLS", ""),
        ("acme.Elsewhere", "", ""),
        ("acme.Gone", "acme_tools:GONE", "acme.Gone cannot be imported from acme_tools:GONE"),
        ("acme.Counting", "acme_tools:OTHER", "acme.Counting is a toolset and an MCP server"),
    ],
)
def test_lint_names_a_toolset_that_its_package_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, why: str
) -> None:
    folder = tmp_path / "more"
    folder.mkdir()
    group = "etude.mcp_servers" if "OTHER" in value else "etude.toolsets"
    entries = {group: {name: value}} if value else {}
    install_package(folder, monkeypatch, name="acme_more", source="", entries=entries)
    head = "apiVersion: etude.dev/v1alpha1\nkind: EvalRun\nmetadata: {name: a}\n"
    text = f"{head}spec: {{rollout: {{toolset: {name}}}}}\n"
    found = [each.what for each in lint_text(text, name="a.yaml") if "acme" in each.what]
    assert len(found) == bool(why)
    assert all(why in each for each in found)
