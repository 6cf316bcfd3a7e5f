"""State file of the local runtime in a run folder, read by the command line."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field, JsonValue, ValidationError

from etude.common import atomic
from etude.common.api.meta import Model

FILE = "local.json"
IMAGES_VARIABLE = "ETUDE_IMAGES"
"""Names the folder of images where it is not the user's own."""


def images_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Folder of microVM images: $ETUDE_IMAGES, or a folder of the user's cache."""
    if given := environment.get(IMAGES_VARIABLE):
        return Path(given)
    cache = environment.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "etude" / "images"


class LocalPod(Model):
    """One pod of the run as a process of this host."""

    name: str
    """Pod name, the same as in a cluster."""
    role: str
    """trainer, inference, rewards, broker or node."""
    state: str
    """Pending, Starting, Ready, BackOff or Stopped."""
    restarts: int = 0
    """Times that the process was started again in this attempt."""
    pid: int | None = None
    """Process id while it runs."""
    ports: dict[str, int] = Field(default_factory=dict)
    """Loopback port behind each named container port."""
    log: str = ""
    """Log file of the present attempt, relative to the run folder."""
    message: str = ""
    """Why it is not ready, if something is wrong."""


class LocalState(Model):
    """The newest state of a run on this host; overwritten at most twice a second."""

    pid: int
    """Process id of the runtime that wrote this."""
    updated_unix_ms: Annotated[int, Field(ge=0)]
    """When this was written."""
    run: dict[str, JsonValue]
    """The RLRun object with its status, exactly as an API server would show it."""
    pools: tuple[dict[str, JsonValue], ...] = ()
    """The EnvPool objects of the run."""
    pods: tuple[LocalPod, ...] = ()
    """Its processes."""
    events: tuple[str, ...] = ()
    """Newest events, oldest first, at most 20, each one line that starts with the time."""


def write_state(folder: Path, state: LocalState) -> None:
    """Replace the state file atomically."""
    atomic.write_text(folder / FILE, state.model_dump_json(by_alias=True))


def read_state(folder: Path) -> LocalState | None:
    """The newest state, or None where no run was started or the file is not readable yet."""
    try:
        return LocalState.model_validate_json((folder / FILE).read_bytes())
    except (OSError, ValidationError):
        return None
