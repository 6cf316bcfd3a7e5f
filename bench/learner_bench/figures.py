"""The file of the learner's figures, which several benches write."""

import json
from collections.abc import Mapping
from pathlib import Path

OUT = Path(__file__).parents[1] / "out" / "learner.json"


def merge_figures(figures: Mapping[str, float], path: Path = OUT) -> None:
    """Write figures over those of the same name; others stay."""
    path.parent.mkdir(exist_ok=True)
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | dict(figures), indent=2, sort_keys=True) + "\n")
