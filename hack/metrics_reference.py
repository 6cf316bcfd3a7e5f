"""Writes docs/reference/metrics.md from the metrics modules: `python hack/metrics_reference.py`."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

PAGE = Path("docs") / "reference" / "metrics.md"
MODULES: Mapping[str, str] = {
    "Operator": "operator/etude/operator/metrics.py",
    "Trainer": "services/trainer/etude/trainer/metrics.py",
    "Inference": "services/inference/etude/inference/metrics.py",
    "Environments: broker and nodes": "services/envserver/etude/envserver/metrics.py",
    "Rewards": "services/rewards/etude/rewards/metrics.py",
    "Gateway": "services/gateway/etude/gateway/metrics.py",
    "Feedback": "services/feedback/etude/feedback/metrics.py",
    "Every part: certificates": "services/common/etude/common/tls/metrics.py",
}
HEAD = """\
# Metrics reference

<!-- Generated from each part's metrics.py by `python hack/metrics_reference.py`; do not edit. -->

Prometheus series of each part, at `/metrics` of its probe port. A histogram has the series
`…_bucket`, `…_sum` and `…_count`. Engines show vLLM's own series beside ours.
"""


class Metric(NamedTuple):
    """One metric as Prometheus shows it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    about: str


def metrics(source: str) -> Iterator[Metric]:
    """Every metric that a module makes, in its order."""
    for node in ast.parse(source).body:
        call = node.value if isinstance(node, ast.Assign) else None
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
            continue
        kind = call.func.id.lower()
        name, about, *labels = (ast.literal_eval(each) for each in call.args)
        # The client adds the ending to every counter that does not have it.
        ending = "_total" if kind == "counter" and not str(name).endswith("_total") else ""
        yield Metric(f"{name}{ending}", kind, tuple(*labels), about.rstrip("."))


def page(root: Path) -> str:
    """The page as Markdown."""
    parts = [HEAD]
    for part, path in MODULES.items():
        rows = map(_row, metrics((root / path).read_text(encoding="utf-8")))
        head = f"## {part}\n\n| name | kind | labels | |\n|---|---|---|---|"
        parts.append("\n".join([head, *rows, ""]))
    return "\n".join(parts)


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.about}. |"


if __name__ == "__main__":
    PAGE.write_text(page(Path()), encoding="utf-8")
