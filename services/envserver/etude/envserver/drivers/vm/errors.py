"""Errors of VMs and their monitor processes (VMMs)."""

from etude.common.errors import CorruptError
from etude.envserver.drivers.base import SandboxError


class VmmError(SandboxError):
    """The VMM process died, hung, or refused a command."""

    reason = "VmmFailed"


class FormatError(VmmError):
    """The migration stream has another format than expected, so deltas are not possible."""

    reason = "DeltaUnsupported"


class IntegrityError(CorruptError):
    """A stored state was not written by this host, and must not be restored."""
