"""Every way to render the chart that the tests know: profiles, and each value in turn."""

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import yaml
from tests.support.chart.helm import CHART, ROOT, SERVED
from tests.support.chart.value_schema import put

EFFECTS: dict[str, Any] = yaml.safe_load(
    (ROOT / "tests" / "contract" / "chart" / "effects.yaml").read_text(encoding="utf-8")
)

WITHOUT_SCHEMA = frozenset({"tls.issuerRef."})
"""Values whose context makes kinds of cert-manager, whose schemas are not bundled."""


class Render(NamedTuple):
    """One set of values."""

    name: str
    values: dict[str, Any]
    words: tuple[str, ...] = ()


def renders() -> Iterator[Render]:
    """Defaults, everything at once, each profile, and everything with each value changed."""
    yield Render("defaults", {})
    yield Render("everything", EFFECTS["context"], SERVED)
    for path in sorted((CHART / "profiles").glob("*.yaml")):
        yield Render(path.stem, {"image": EFFECTS["context"]["image"]}, ("-f", str(path)))
    for name, value in EFFECTS["examples"].items():
        values = copy.deepcopy(EFFECTS["context"])
        for prefix, beside in EFFECTS["contexts"].items():
            if name.startswith(prefix) and prefix not in WITHOUT_SCHEMA:
                values[prefix.partition(".")[0]] = copy.deepcopy(beside)
        put(values, tuple(name.split(".")), value)
        yield Render(name, values, SERVED)
