"""How this process speaks to others: with certificates, or in the clear.

The one place that reads ETUDE_TLS: a setting handed from main to every channel would be forgotten
at one of them, which would then speak in the clear.
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
"""A folder with ca.crt, tls.crt and tls.key, or Plaintext; unset, only loopback is spoken to."""
PLAINTEXT = "Plaintext"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """What a process was told about its wire."""

    credentials: "Credentials | None" = None
    """None speaks in the clear."""
    leaves_machine: bool = True
    """Whether it may without certificates."""

    def require_private(self, address: str, what: str) -> None:
        """Refuse to speak in the clear beyond this machine unless told to.

        Raises:
            UserError: that is what it would come to.
        """
        if self.credentials is None and not self.leaves_machine and not is_loopback(address):
            fix = f"set {VARIABLE} to a folder with certificates, or to {PLAINTEXT}"
            raise UserError(Problem(REASON, f"{what} would not be encrypted", address, fix))


def told(setting: str) -> Wire:
    """The wire that a value of ETUDE_TLS asks for.

    Raises:
        UserError: the folder cannot be used.
    """
    if not setting:
        return Wire(leaves_machine=False)
    if setting == PLAINTEXT:
        return Wire()
    # A third of a second of imports, which who speaks in the clear need not wait for.
    from etude.common.tls.credentials import Credentials  # noqa: PLC0415

    return Wire(credentials=Credentials(Path(setting)))


@functools.cache
def own() -> Wire:
    """This process's wire, read once.

    Raises:
        UserError: the folder cannot be used.
    """
    return told(os.environ.get(VARIABLE, ""))
