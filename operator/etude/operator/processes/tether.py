"""Ties a command to its parent: it dies when the parent dies.

Run as a script with the bare interpreter: it must start fast and import nothing of ours.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Tie this process to the parent named first, then run the rest of the command line."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        # It died before we asked to be told.
        os._exit(137)
    try:
        os.execvp(command[0], command)  # noqa: S606 - the container's own command
    except OSError as cause:
        sys.stderr.write(f"{command[0]}: {cause.strerror}\n")
        os._exit(127)


if __name__ == "__main__":
    main()
