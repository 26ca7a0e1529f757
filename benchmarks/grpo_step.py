"""A whole GRPO step of ROLL and of TRL: seconds per step at fixed answer lengths, and seconds until the task is learned.

The step: 64 prompts × 8 samples of at most 128 new tokens, sums of two-digit numbers, one update. Weights stay as they
are (a learning rate of nothing), so that answers keep their length; both answer the same 64 prompts every step at
temperature 1, and the mean length of their answers is printed, which must agree within 5 %. Seconds are the median over
the steps after the first two, which compile.

`--learn` trains (learning rate 1e-5, no KL penalty, as TRL was run) until the mean reward of a step reaches 0.85, for
each of `--seeds`, and counts seconds from the first step's beginning.

TRL runs in a process of its own if this interpreter has it, with vLLM in the trainer's process if it has that too.
"""

from __future__ import annotations

import importlib.util
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import parser, report

QUESTION = "What is {a} + {b}? Answer with just the number."
WARM_UP = 2
NOTHING = 1e-30
"""A learning rate that changes no weight."""
GOAL = 0.85


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", default="smollm2-135m")
    options.add_argument("--device", default="auto", help="auto, cpu or 0")
    options.add_argument("--dtype", default="auto")
    options.add_argument("--prompts", type=int, default=64)
    options.add_argument("--samples", type=int, default=8, help="of each prompt")
    options.add_argument("--new-tokens", type=int, default=128)
    options.add_argument("--steps", type=int, default=10)
    options.add_argument("--learn", action="store_true", help="also the seconds until the task is learned")
    options.add_argument("--most-steps", type=int, default=80, help="of a learning run")
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--no-trl", action="store_true")
    options.add_argument("--trl-child", help=argparse_hidden())
    args = options.parse_args()
    if args.trl_child:
        trl_child(json.loads(args.trl_child))
        return

    result: dict[str, Any] = {"model": args.model, "prompts": args.prompts, "samples": args.samples}
    ours = roll_step(args)
    result |= {f"roll_{name}": value for name, value in ours.items()}
    result["seconds"] = ours["seconds"]
    print_head()
    print_row("ROLL", ours)
    if not args.no_trl and importlib.util.find_spec("trl"):
        theirs = trl_step(args)
        result |= {f"trl_{name}": value for name, value in theirs.items()}
        result["over_trl"] = theirs["seconds"] / ours["seconds"]
        print_row("TRL", theirs)
        apart = abs(ours["answer_tokens"] / theirs["answer_tokens"] - 1)
        print(f"TRL takes {result['over_trl']:.2f} times as long; answer lengths are {100 * apart:.1f} % apart")
        assert apart <= 0.05, "the two do not answer alike"
    if args.learn:
        runs = []
        for seed in range(args.seeds):
            runs.append(run := roll_learns(args, seed))
            took = f"{run['steps']} steps, {run['seconds']:.1f} s"
            print(f"seed {seed}: reward {run['reward']:.3f} after {took}", flush=True)
        result["learned_s"] = [run["seconds"] for run in runs]
        result["learned_steps"] = [run["steps"] for run in runs]
        result["learned_reward"] = [run["reward"] for run in runs]
    if args.json:
        report(result, True)


def argparse_hidden() -> str:
    import argparse

    return argparse.SUPPRESS


def print_head() -> None:
    print("| | seconds per step | generating | training | answer tokens, mean |")
    print("| --- | --- | --- | --- | --- |")


def print_row(name: str, row: dict[str, float]) -> None:
    parts = [f"{row[key]:.3f}" if key in row else "" for key in ("seconds", "generate_s", "train_s")]
    print(f"| {name} | {' | '.join(parts)} | {row['answer_tokens']:.1f} |", flush=True)


def sums(count: int, seed: int) -> list[tuple[int, int]]:
    """Distinct sums of two-digit numbers."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    return random.Random(seed).sample(pairs, count)


def write_tasks(path: Path, pairs: list[tuple[int, int]]) -> None:
    lines = [json.dumps({"question": QUESTION.format(a=a, b=b), "answer": a + b}) for a, b in pairs]
    path.write_text("\n".join(lines))


def settings(args: Any, folder: Path, tasks: Path, seed: int) -> dict[str, Any]:
    return {
        "pipeline": "rlvr",
        "model": {"path": args.model, "dtype": args.dtype},
        "devices": args.device,
        "seed": seed,
        "run": {"dir": str(folder), "tensorboard": False, "checkpoint_every": 0},
        "tasks": {"source": str(tasks), "options": {"held_out": 0.0}},
        "reward": {"name": "number", "workers": 4},
        "rollout": {
            "groups_per_step": args.prompts,
            "group_size": args.samples,
            "max_running": args.prompts * args.samples,
            "max_new_tokens": args.new_tokens,
            "filter": "none",
        },
        "algorithm": "grpo",
        "eval": {"every": 0},
        "threads": args.threads,
    }


def run_roll(config: dict[str, Any], stop_at: float | None = None) -> list[dict[str, float]]:
    """The metrics of every step; `stop_at`: a mean reward of a step that is enough."""
    from roll.config.schema import Config
    from roll.pipeline.entrypoints import train
    from roll.pipeline.report import PlainReporter, StepReport

    steps: list[dict[str, float]] = []

    class Enough(Exception):
        pass

    class Listener(PlainReporter):
        def stepped(self, report: StepReport) -> None:
            steps.append({**report.metrics, "ended": time.perf_counter()})
            if stop_at is not None and report.metrics["reward/mean"] >= stop_at:
                raise Enough

    with suppress(Enough):
        train(Config.model_validate(config), restart=True, reporter=Listener())
    return steps


def roll_step(args: Any) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as place:
        tasks = Path(place) / "tasks.jsonl"
        write_tasks(tasks, sums(args.prompts, 0))
        config = settings(args, Path(place) / "run", tasks, 0)
        config["train"] = {"steps": args.steps, "lr": NOTHING}
        steps = run_roll(config)[WARM_UP:]
    return {
        "seconds": statistics.median(step["time/step_s"] for step in steps),
        "generate_s": statistics.median(step["time/generate_s"] for step in steps),
        "train_s": statistics.median(step["time/train_s"] for step in steps),
        "answer_tokens": statistics.fmean(step["response/tokens_mean"] for step in steps),
    }


def roll_learns(args: Any, seed: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as place:
        tasks = Path(place) / "tasks.jsonl"
        write_tasks(tasks, sums(4096, seed))
        config = settings(args, Path(place) / "run", tasks, seed)
        config["train"] = {"steps": args.most_steps, "lr": 1e-5}
        steps = run_roll(config, stop_at=GOAL)
    seconds = steps[-1]["ended"] - steps[0]["ended"] + steps[0]["time/step_s"]
    return {"seconds": seconds, "steps": len(steps), "reward": steps[-1]["reward/mean"]}


def trl_step(args: Any) -> dict[str, float]:
    """TRL's steps, in a process of its own."""
    from roll.model.find import find_model

    wanted = {
        "model": str(find_model(args.model).location),
        "prompts": [[QUESTION.format(a=a, b=b), a + b] for a, b in sums(args.prompts, 0)],
        **{name: getattr(args, name) for name in ("samples", "new_tokens", "steps", "device")},
    }
    with tempfile.TemporaryDirectory() as place:
        wanted["out"] = str(Path(place) / "out.json")
        subprocess.run([sys.executable, __file__, "--trl-child", json.dumps(wanted)], check=True, stdout=sys.stderr)
        steps = json.loads(Path(wanted["out"]).read_text())[WARM_UP:]
    return {
        "seconds": statistics.median(step["seconds"] for step in steps),
        "answer_tokens": statistics.fmean(step["answer_tokens"] for step in steps),
    }


def trl_child(wanted: dict[str, Any]) -> None:
    import re

    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    on_gpu = torch.cuda.is_available() and wanted["device"] != "cpu"
    vllm = on_gpu and importlib.util.find_spec("vllm") is not None
    samples = len(wanted["prompts"]) * wanted["samples"]
    parts = 2 if on_gpu and samples % 2 == 0 else 1  # all of them at once take more than the 140 GB of an H200
    steps: list[dict[str, float]] = []
    began = time.perf_counter()

    def right(completions: list[Any], answer: list[int], **_: Any) -> list[float]:
        found = [re.findall(r"-?\d+", text[0]["content"]) for text in completions]
        return [
            float(bool(numbers) and int(numbers[-1]) == wanted) for numbers, wanted in zip(found, answer, strict=True)
        ]

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
            nonlocal began
            if logs and "completions/mean_length" in logs:
                if on_gpu:
                    torch.cuda.synchronize()
                now = time.perf_counter()
                steps.append({"seconds": now - began, "answer_tokens": float(logs["completions/mean_length"])})
                began = now

    options: dict[str, Any] = {}
    if vllm:
        options = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3}
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        learning_rate=0.0,
        max_steps=wanted["steps"],
        per_device_train_batch_size=samples // parts,
        gradient_accumulation_steps=parts,
        num_generations=wanted["samples"],
        max_completion_length=wanted["new_tokens"],
        temperature=1.0,
        beta=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        bf16=on_gpu,
        use_cpu=not on_gpu,
        gradient_checkpointing=False,
        **options,
    )
    rows = [{"prompt": [{"role": "user", "content": q}], "answer": a} for q, a in wanted["prompts"]]
    tokenizer = AutoTokenizer.from_pretrained(wanted["model"])
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    trainer = GRPOTrainer(
        model=wanted["model"],
        reward_funcs=right,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    began = time.perf_counter()
    trainer.train()
    Path(wanted["out"]).write_text(json.dumps(steps))


if __name__ == "__main__":
    main()
