"""What every benchmark shares: its options, and its output as one JSON object on the last line."""

from __future__ import annotations

import argparse
import json
import os
import platform
from typing import Any


def parser(description: str | None) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="CPU threads (default: one a core)")
    return options


def report(result: dict[str, Any], as_json: bool) -> None:
    """Prints the figures, for people or as JSON."""
    if as_json:
        machine = {"machine": platform.machine(), "cores": os.cpu_count()}
        print(json.dumps({**result, **machine}))
        return
    for name, value in result.items():
        print(f"{name:32} {value:.3f}" if isinstance(value, float) else f"{name:32} {value}")
