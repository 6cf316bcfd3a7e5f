"""The demo's own figures, from a run of it: python bench/demo.py [--run runs/demo]."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

OUT = Path(__file__).parent / "out" / "demo.json"


def main() -> None:
    """Run the demo unless it has been run, and write its figures to bench/out/demo.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("runs/demo"))
    run = parser.parse_args().run
    if not (run / "demo.json").is_file():
        code = "from etude.cli.main import main; main()"
        subprocess.run([sys.executable, "-c", code, "demo", "--dir", str(run)], check=True)
    figures = json.loads((run / "demo.json").read_text())
    for name, value in figures.items():
        print(f"{name:18} {value:,.3f}")
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
