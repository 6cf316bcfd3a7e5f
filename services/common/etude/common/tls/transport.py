"""Transport security of this process: mutual TLS, or plaintext.

The one place that reads ETUDE_TLS: a setting handed from main to every channel would be forgotten
at one of them, which would then be unencrypted.
"""

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from etude.common.errors import Problem, UserError
from etude.common.tls.targets import REASON, is_loopback

if TYPE_CHECKING:
    from etude.common.tls.credentials import Credentials

VARIABLE = "ETUDE_TLS"
"""A folder with ca.crt, tls.crt and tls.key, or Plaintext; unset allows loopback alone."""
PLAINTEXT = "Plaintext"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportSecurity:
    """Transport security of a process: its certificates, or permission for plaintext."""

    credentials: "Credentials | None" = None
    """None is plaintext."""
    allows_remote_plaintext: bool = True
    """True if plaintext may leave this machine."""

    def require_private(self, address: str, what: str) -> None:
        """Refuse plaintext beyond this machine unless the setting allows it.

        Raises:
            UserError: the address is not on this machine.
        """
        if (
            self.credentials is None
            and not self.allows_remote_plaintext
            and not is_loopback(address)
        ):
            fix = f"set {VARIABLE} to a folder with certificates, or to {PLAINTEXT}"
            raise UserError(Problem(REASON, f"{what} would not be encrypted", address, fix))


def security_from_setting(setting: str) -> TransportSecurity:
    """The transport security that a value of ETUDE_TLS asks for.

    Raises:
        UserError: the folder cannot be used.
    """
    if not setting:
        return TransportSecurity(allows_remote_plaintext=False)
    if setting == PLAINTEXT:
        return TransportSecurity()
    # A third of a second of imports, which plaintext does not need.
    from etude.common.tls.credentials import Credentials  # noqa: PLC0415

    return TransportSecurity(credentials=Credentials(Path(setting)))


@functools.cache
def process_security() -> TransportSecurity:
    """The transport security of this process, read once.

    Raises:
        UserError: the folder cannot be used.
    """
    return security_from_setting(os.environ.get(VARIABLE, ""))
