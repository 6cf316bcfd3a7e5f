"""HTTP in front of a pool, for people and programs that are no training run."""

from typing import Annotated

from pydantic import Field

from etude.common.api.meta import Model, NameRef, Uri


class EnvironmentApi(Model):
    """OpenEnv, MCP and sandboxes over HTTP, from one process; its sandboxes end with it."""

    keys_ref: NameRef
    """Secret whose entry `keys` has a line for each API key, as `etude-envserver key` prints it."""
    tls_ref: NameRef | None = None
    """Secret with tls.crt and tls.key of its port; needed unless the chart's tls.mode is
    Plaintext."""
    workspace: Uri | None = None
    """First files of a requested sandbox; none unless set."""
    max_sandboxes: Annotated[int, Field(ge=1, le=10_000)] = 100
    """Sandboxes at a time, over all keys."""
