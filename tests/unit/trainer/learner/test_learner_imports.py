"""Modules that the controller may load without paying for torch."""

import subprocess
import sys

LIGHT = (
    "learner.batches",
    "learner.config",
    "algorithms.advantages",
    "algorithms.aggregation",
)


def test_the_controllers_half_loads_without_torch() -> None:
    imports = "; ".join(f"import etude.trainer.{name}" for name in LIGHT)
    check = "import sys; assert not {'torch', 'transformers', 'ray'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", f"{imports}; {check}"], check=True, timeout=120)
