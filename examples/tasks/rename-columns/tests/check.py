"""Whether every column is kept, under the names that were asked for."""

import sys
from pathlib import Path

sys.path.insert(0, "/workspace")

from table.reader import read_rows

CASES = {
    "a,b\n1,2\n": ["a", "b"],
    "x,x,x\n1,2,3\n": ["x", "x_2", "x_3"],
    "x,x_2,x\n1,2,3\n": ["x", "x_2", "x_3"],
    "x,x,x_2\n1,2,3\n": ["x", "x_3", "x_2"],
    "a,b,a,b\n1,2,3,4\n": ["a", "b", "a_2", "b_2"],
}


def main() -> int:
    """0 if all is as asked."""
    for text, names in CASES.items():
        values = text.splitlines()[1].split(",")
        if read_rows(text) != [dict(zip(names, values, strict=True))]:
            print(f"wrong: {text!r}")
            return 1
    header = Path("/workspace/header.txt")
    if not header.is_file() or header.read_text().strip() != "city,score,score_3,note,score_2":
        print("wrong: header.txt")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
