#!/bin/bash
set -e
cp "$(dirname "$0")/reader.py" table/reader.py
python3 - > header.txt <<'PYTHON'
from pathlib import Path

from table.reader import read_rows

print(",".join(read_rows(Path("table/example.csv").read_text())[0]))
PYTHON
