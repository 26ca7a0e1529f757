"""Seconds from an edited reward function to the first finished training step.

What a researcher waits for after saving a file: starting Python, importing, loading the model, starting the graders, one
step. Beside it the floor: a Python process that only imports torch and transformers' causal models.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from common import parser, report

REWARD = """
def judge(task, response):
    return float(response.text.strip() == str(task.answer)) * {weight}
"""


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--config", default=str(Path(__file__).parent.parent / "examples" / "tiny.yaml"))
    options.add_argument("--repeats", type=int, default=3)
    args = options.parse_args()
    cycles, floors = [], []
    for i in range(args.repeats):
        floors.append(import_seconds())
        cycles.append(cycle_seconds(args.config, args.threads, weight=i + 1))
    cycle, floor = sorted(cycles)[len(cycles) // 2], sorted(floors)[len(floors) // 2]
    report({"config": args.config, "cycle_s": cycle, "imports_s": floor, "over_imports": cycle / floor}, args.json)


def cycle_seconds(config: str, threads: int, weight: int) -> float:
    """Edits the reward and trains until the first step is on record."""
    with tempfile.TemporaryDirectory() as folder:
        reward, run = Path(folder) / "reward.py", Path(folder) / "run"
        reward.write_text(REWARD.format(weight=weight))
        started = time.perf_counter()
        command = [sys.executable, "-m", "roll.cli", "train", config, "--plain"]
        settings = [
            f"reward={reward}:judge",
            f"run.dir={run}",
            f"threads={threads}",
            "eval.every=0",
            "rollout.filter=none",
        ]
        process = subprocess.Popen([*command, *settings], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith("step 1/"):
                    return time.perf_counter() - started
            raise SystemExit(f"the run ended before its first step, with status {process.wait()}")
        finally:
            process.kill()
            process.wait()


def import_seconds() -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch; from transformers import LlamaForCausalLM"], check=True)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
