"""Lister of an MCP server's tools, for the package that offers them to policies.

python -m etude.agent.tools.mcp_listing COMMAND [ARGUMENT …] > tools.json
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from etude.agent.tools.base import ToolError
from etude.agent.tools.mcp_exchange import read_answer, write_script
from etude.agent.tools.mcp_server import MAX_LISTING_BYTES, ToolListing, parse_listing
from etude.agent.workspace import ExecResult

_TIMEOUT_S = 60.0


def list_tools(command: Sequence[str]) -> ToolListing:
    """List the tools of a server, which is started on this machine.

    Raises:
        ToolError: it does not answer.
        ValueError: its tools cannot be used; the message says why.
    """
    script = write_script(command, "tools/list", {}, max_bytes=MAX_LISTING_BYTES)
    shell = subprocess.Popen(
        ["/bin/sh", "-c", script], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        output, _ = shell.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as cause:
        raise ToolError(f"{command[0]} did not answer within {_TIMEOUT_S:g} s") from cause
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()
    printed = ExecResult(output=output, exit_code=shell.returncode)
    result = read_answer(printed, max_bytes=MAX_LISTING_BYTES)
    return parse_listing(json.dumps(result).encode())


def main(arguments: Sequence[str]) -> int:
    """Print the listing, or why there is none."""
    if not arguments:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    try:
        found = list_tools(arguments)
    except (ToolError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(found.model_dump_json(by_alias=True, exclude_none=True, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
