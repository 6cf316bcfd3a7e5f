"""What can go wrong between this process and a machine monitor."""

from etude.common.errors import CorruptError
from etude.envserver.drivers.base import SandboxError


class VmmError(SandboxError):
    """A machine monitor died, hung, or refused a command."""

    reason = "VmmFailed"


class FormatError(VmmError):
    """A stream is not in the one format that this code takes apart, so there are no deltas."""

    reason = "DeltaUnsupported"


class IntegrityError(CorruptError):
    """A stored stream is not what this node wrote; the monitor must not see it."""
