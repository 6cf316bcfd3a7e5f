"""Step profiler: a Chrome trace of the operations of a learner rank's step, in the run's store."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerActivity, profile

from etude.common.api.run.phases import Phase
from etude.common.blobs import Store
from etude.common.errors import StoreError

log = logging.getLogger(__name__)


def trace_key(phase: str, *, step: int, rank: int) -> str:
    """Key of a trace in the run's store."""
    return f"profiles/{phase}/step-{step}-rank-{rank}.json.gz"


@contextmanager
def profile_step(phase: Phase, *, step: int, rank: int, store: Store) -> Iterator[None]:
    """Record the step inside the block, if the phase asks for it.

    Perfetto and chrome://tracing show the trace. A store that fails costs the trace, not the step.

    Args:
        phase: under way.
        step: of the phase, from 1.
        rank: of this process.
        store: of the run.
    """
    wanted = phase.profile
    if wanted is None or not 0 <= step - wanted.first_step < wanted.num_steps:
        yield
        return
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as recorded:
        yield
    key = trace_key(phase.name, step=step, rank=rank)
    with TemporaryDirectory(prefix="etude-profile-") as folder:
        file = Path(folder) / "trace.json.gz"
        try:
            recorded.export_chrome_trace(str(file))
            store.put(key, file.read_bytes())
        except (StoreError, OSError, RuntimeError) as error:
            log.warning("step %d has no trace: %s", step, error)
        else:
            log.info("step %d: trace in %s/%s", step, store.url, key)
