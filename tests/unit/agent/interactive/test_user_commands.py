"""Commands of the policy in a user's own folder."""

from pathlib import Path

from etude.agent.interactive.commands import CommandRunner


async def test_a_command_cannot_print_the_api_key(tmp_path: Path) -> None:
    environment = {"PATH": "/usr/bin:/bin", "ETUDE_API_KEY": "etude_7", "EDITOR": "vi"}
    result = await CommandRunner(tmp_path, environment).run("env", 10.0)
    assert b"EDITOR=vi" in result.output
    assert b"etude_7" not in result.output
