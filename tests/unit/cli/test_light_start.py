"""What a verb does not need is not loaded for it: people wait for every start."""

import subprocess
import sys

HEAVY = ("pydantic", "numpy", "yaml", "obstore", "jinja2", "etude.v1", "etude.common.api")


def test_the_commands_are_listed_without_loading_the_api() -> None:
    program = (
        "import sys, etude.cli.main\n"
        f"found = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "assert not found, f'loaded for --help: {found}'\n"
    )
    done = subprocess.run(
        (sys.executable, "-c", program), capture_output=True, check=False, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
