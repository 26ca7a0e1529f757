"""How often tests use names that begin with an underscore and belong to others: the number may only fall.

`python tests/private_names.py` fails if it is larger than `MOST`, and asks for a smaller `MOST` if it is smaller.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MOST = 421


def count() -> int:
    ruff = Path(sys.executable).with_name("ruff")
    command = [
        str(ruff),
        "check",
        "--select",
        "SLF001",
        "--output-format",
        "json",
        "--exit-zero",
        str(Path(__file__).parent),
    ]
    return len(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))


def main() -> int:
    found = count()
    if found > MOST:
        print(f"tests use private names of others {found} times, and may do so {MOST} times: use public ones")
    elif found < MOST:
        print(f"tests use private names of others {found} times: write MOST = {found} in {Path(__file__).name}")
    return int(found != MOST)


if __name__ == "__main__":
    sys.exit(main())
