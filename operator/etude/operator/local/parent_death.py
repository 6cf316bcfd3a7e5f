"""Parent-death signal: runs a command that is killed when its parent ends.

Runs as a script in a bare interpreter, for a fast start, and imports nothing of this package.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Bind this process to the parent in the first argument, then run the other arguments."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        # It ended before the prctl call.
        os._exit(137)
    try:
        os.execvp(command[0], command)  # noqa: S606 - the container's own command
    except OSError as cause:
        sys.stderr.write(f"{command[0]}: {cause.strerror}\n")
        os._exit(127)


if __name__ == "__main__":
    main()
