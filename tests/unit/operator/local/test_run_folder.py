"""What a run on one machine remembers from one start to the next."""

from pathlib import Path
from typing import Any

import pytest

from etude.operator.local import run_folder
from etude.operator.manifests import Manifest

RESUMPTION = {"number": 2, "mode": "Best", "name": "demo-s00000020-000000", "step": 20}


def run(ending: str | None) -> Manifest:
    conditions = [] if ending is None else [{"type": ending, "status": "True", "reason": "R"}]
    status: dict[str, Any] = {
        "conditions": conditions,
        "startTime": "2026-01-01T00:00:00Z",
        "resumption": RESUMPTION,
        "active": {"seconds": 5.0},
    }
    metadata = {"name": "demo", "namespace": "default", "uid": "u"}
    return {"kind": "RLRun", "metadata": metadata, "spec": {}, "status": status}


@pytest.mark.parametrize("ending", [None, "Failed"])
def test_where_a_run_was_put_back_to_is_known_to_whoever_starts_it_again(
    tmp_path: Path, ending: str | None
) -> None:
    run_folder.save_objects(tmp_path, [run(ending)])
    (found,) = run_folder.load_objects(tmp_path)
    assert found["status"]["resumption"] == RESUMPTION
    assert found["status"]["active"] == {"seconds": 5.0}
    assert run_folder.run_outcome(found) is None
