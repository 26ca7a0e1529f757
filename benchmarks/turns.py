"""What a turn costs: episodes of Sokoban, played by a run, beside the same environments played without a model.

Every variant is a run of a few steps of 256 episodes: `local` is one process, `ray:N` has N rollout workers and as many
environment workers. Its turns a second are those of all steps but the first, over the seconds of generation. On a GPU
the model is SmolLM2-135M. On a CPU it is one layer, 64 wide, with SmolLM2's tokenizer and template: next to nothing is
computed, and what is left is the host's work. The floor is the environments alone, in as many processes, moved at random.

The host's work by itself is CPU time in a run of 512 episodes whose engine computes nothing (`turn_host.py`):
`host_ms_per_turn` of the controller's process with the paged engine, `slot_host_ms_per_turn` with the slot engine, and
`env_ms_per_turn` of the environment processes. `--against` measures another checkout of ROLL too, in turn with this one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import parser, report

from roll.data.task import EnvSpec
from roll.env.pool import EnvPool

EPISODES = 256
HOST_EPISODES = 512
PROCESSES = 4
TURNS = 20
RUN_S = 900
OPTIONS = {"format": "free", "turns": TURNS}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--variants", nargs="*", default=["local"], help="local, ray:1, ray:2 …")
    options.add_argument("--steps", type=int, default=3)
    options.add_argument("--host-episodes", type=int, default=HOST_EPISODES, help="of the runs that compute nothing")
    options.add_argument("--against", type=Path, help="folder of another checkout, to measure the host's work there too")
    args = options.parse_args()
    result: dict[str, Any] = {"floor_turns_per_s": asyncio.run(floor())}
    with tempfile.TemporaryDirectory() as folder:
        small = small_model(Path(folder) / "model")
        result |= host_costs(small, Path(folder) / "run", args)
        model = "smollm2-135m" if on_gpu() else small
        for variant in args.variants:
            speed = turns_per_s(variant, model, Path(folder) / "run", args.steps, args.threads)
            result |= {
                f"{variant}_turns_per_s": speed,
                f"{variant}_ms_a_turn": 1e3 / speed,
                f"{variant}_of_floor": speed / result["floor_turns_per_s"],
            }
    report(result, args.json)


def on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def small_model(folder: Path) -> str:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from roll.model.find import find_model

    real = find_model("smollm2-135m").location
    config = AutoConfig.from_pretrained(real)
    config.update({"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "head_dim": 64})
    config.update({"num_attention_heads": 1, "num_key_value_heads": 1})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(real).save_pretrained(folder)
    return str(folder)


def host_costs(model: str, run: Path, args: argparse.Namespace) -> dict[str, float]:
    """CPU milliseconds of the host per turn, without computation."""
    codes = {"": Path(__file__).parents[1]} | ({"_against": args.against.resolve()} if args.against else {})
    found: dict[str, float] = {}
    for engine, prefix in (("paged", ""), ("slot", "slot_")):
        for suffix, code in codes.items():
            config = config_of(model, run, args.host_episodes) | {"train": {"steps": args.steps}}
            result = run.with_suffix(".host")
            script = [str(Path(__file__).with_name("turn_host.py")), engine, str(result), str(written(config, run))]
            finish([sys.executable, *script], {"PYTHONPATH": str(code), "CUDA_VISIBLE_DEVICES": ""}, engine)
            costs = json.loads(result.read_text())
            found |= {f"{prefix}{name}{suffix}": costs[name] for name in ("host_ms_per_turn", "env_ms_per_turn")}
        name = f"{prefix}host_ms_per_turn"
        if args.against:
            found[f"{name}_times_less"] = found[f"{name}_against"] / found[name]
    return found


def turns_per_s(variant: str, model: str, run: Path, steps: int, threads: int) -> float:
    executor, _, workers = variant.partition(":")
    config = config_of(model, run, EPISODES) | {
        "executor": executor,
        "threads": threads,
        "train": {"steps": steps, "lr": 1e-8, "micro_batch_tokens": 16384},
    }
    if workers:
        config["env"] |= {"processes": PROCESSES // int(workers)}
        config["roles"] = {role: {"replicas": int(workers)} for role in ("rollout", "env")}
    command = [sys.executable, "-c", "from roll.cli import main; main()", "train", str(written(config, run)), "--restart"]
    finish(command, {}, variant)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    counted = [row for row in rows if "time/generate_s" in row][1:]
    return sum(EPISODES * row["reward/turns"] for row in counted) / sum(row["time/generate_s"] for row in counted)


def config_of(model: str, run: Path, episodes: int) -> dict[str, Any]:
    return {
        "pipeline": "rlvr",
        "model": model,
        "run": str(run),
        "tasks": {"source": "environment", "options": {"name": "sokoban", "count": 2000, **OPTIONS}},
        "env": {"max_turns": TURNS, "processes": PROCESSES, "per_process": episodes},
        "algorithm": "gigpo",
        "rollout": {
            "groups_per_step": episodes // 16,
            "group_size": 16,
            "max_running": episodes,
            "max_new_tokens": 2,
            "filter": "none",
        },
        "eval": {"every": 0, "samples": 1},
    }


def written(config: dict[str, Any], run: Path) -> Path:
    file = run.with_suffix(".json")  # which is YAML too
    file.write_text(json.dumps(config))
    return file


def finish(command: list[str], variables: dict[str, str], what: str) -> None:
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "TOKENIZERS_PARALLELISM": "false"} | variables
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=RUN_S)
    if done.returncode:
        sys.exit(f"{what}: {(done.stdout + done.stderr)[-2000:]}")


async def floor() -> float:
    moves = ("up", "down", "left", "right")
    rng = random.Random(0)

    async def play(pool: EnvPool, seed: int) -> int:
        await pool.reset(str(seed), EnvSpec("sokoban", seed, OPTIONS))
        for turn in range(1, TURNS + 1):
            if (await pool.step(str(seed), rng.choice(moves))).done:
                return turn
        await pool.close_episode(str(seed))
        return TURNS

    async with EnvPool(PROCESSES, EPISODES) as pool:
        await asyncio.gather(*(play(pool, seed) for seed in range(EPISODES)))
        started = time.perf_counter()
        played = await asyncio.gather(*(play(pool, seed) for seed in range(EPISODES, 2 * EPISODES)))
        return sum(played) / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
