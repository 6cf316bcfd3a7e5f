"""The demo's run, cut to what a node does in a test, and its data."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etude.common.api import yaml_documents

ROOT = Path(__file__).parents[2]
TASKS = 64
SIZES = ("--held-out", "16", "--traces", "400")

Store = Mapping[str, str]


def make_data(store: Store, tasks: int = TASKS) -> None:
    """Model, tasks and transcripts of the demo, in the bucket that pods read.

    Args:
        store: where; its folder is the bucket.
        tasks: to train on. A run uses each once.
    """
    generate = (sys.executable, "-m", "etude.demo.generate")
    where = ("--out", str(Path(store["folder"]) / "demo"), "--seed", "0")
    sizes = ("--rl", str(tasks), *SIZES)
    subprocess.run((*generate, *where, *sizes), check=True, capture_output=True, timeout=300)


def cut_demo(store: Store, prefix: str) -> dict[str, Any]:
    """The demo's manifest, with the cluster's store and a few steps of each phase."""
    run = short_demo()
    run["spec"]["storage"] = {
        "uri": f"s3://etude/{prefix}",
        "endpoint": store["endpoint"],
        "region": "us-east-1",
        "secretRef": {"name": "s3"},
    }
    return run


def short_demo() -> dict[str, Any]:
    """The demo's manifest with a few steps of each phase."""
    text = (ROOT / "examples" / "demo" / "rlrun.yaml").read_bytes()
    run: dict[str, Any] = json.loads(json.dumps(yaml_documents.parse_documents(text)[0].value))
    spec = run["spec"]
    for phase, steps in zip(spec["phases"], (2, 20, 3), strict=True):
        phase["maxSteps"] = steps
        phase["optimizer"]["warmupSteps"] = 0
    spec["phases"][2]["algorithm"] |= {"promptsPerStep": 4, "groupSize": 4}
    spec["evaluation"][0] |= {"limit": 8, "everySteps": 2}
    spec["checkpointing"] = {"everySteps": 5}
    return run
