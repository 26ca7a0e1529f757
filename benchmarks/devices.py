"""GRPO with a reference and an engine on one GPU: all roles resident, and taking turns on it.

For each layout: the plan's estimate of each process's GPU memory beside the peak that was measured, and seconds per step.
Needs a GPU. Weights are fresh, in the model's own shape or (`--shape 1.5b`) that of a model of that size: such a model
never ends an answer, so that a step has the size it was planned for.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import parser, report

EXAMPLE = Path(__file__).parent.parent / "examples" / "quickstart.yaml"
SETTINGS = [
    *("algorithm.kl_coef=0.01", "rollout.filter=none", "rollout.groups_per_step=16", "rollout.group_size=8"),
    *("rollout.max_running=128", "rollout.max_new_tokens=64", "train.micro_batch_tokens=8192", "train.lr=1e-6"),
    *("model.dtype=bf16", "eval.samples=1", "eval.every=0", "run.tensorboard=false", "run.save_samples=false"),
    *("run.checkpoint_every=0", "rollout.temperature=1.0"),
]
VARIANTS = [("local", "never"), ("local", "always"), ("ray", "never"), ("ray", "always")]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", default="smollm2-135m")
    options.add_argument("--shape", choices=["own", "1.5b"], default="own", help="the model's own, or a larger one")
    options.add_argument("--steps", type=int, default=4)
    options.add_argument("--executors", default="local,ray")
    options.add_argument("--offload", default="never,always")
    options.add_argument("--one", nargs=3, metavar=("MODEL", "EXECUTOR", "OFFLOAD"), help="measure this and stop")
    args = options.parse_args()
    if args.one:
        print(json.dumps(measure(*args.one, steps=args.steps)))
        return
    with tempfile.TemporaryDirectory() as folder:
        model = fresh(args.model, args.shape == "1.5b", Path(folder) / "model")
        rows = []
        for executor, offload in VARIANTS:
            if executor in args.executors.split(",") and offload in args.offload.split(","):
                rows.append(in_own_process(model, executor, offload, args.steps))
                print(rows[-1], flush=True)
    if not args.json:
        table(rows)
    report({"model": args.model, "shape": args.shape, "rows": rows} if args.json else {}, args.json)


def in_own_process(model: str, executor: str, offload: str, steps: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", model, executor, offload, "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        return {"executor": executor, "offload": offload, "error": done.stderr[-2000:] + done.stdout[-500:]}
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def measure(model: str, executor: str, offload: str, steps: int) -> dict[str, Any]:
    """Trains some steps and compares the peak of each process, after the first step, with the plan's."""
    import roll.pipeline.recorder as recorder
    from roll.config import load_config
    from roll.devices.plan import make_plan
    from roll.pipeline.entrypoints import train
    from roll.pipeline.prepare import prepare
    from roll.pipeline.report import PlainReporter
    from roll.run import Metrics

    async def nothing(*args: Any) -> None: ...

    recorder.plot_curve = lambda *args, **kwargs: None  # type: ignore[assignment]
    recorder.Recorder.save = nothing  # type: ignore[assignment, method-assign]
    with tempfile.TemporaryDirectory() as folder:
        overrides = [*SETTINGS, f"model.path={model}", f"executor={executor}", f"offload={offload}"]
        config = load_config(EXAMPLE, [*overrides, f"run.dir={folder}/run", f"train.steps={steps}"])
        plan = make_plan(config, prepare(config).requirements)
        train(config, reporter=PlainReporter())
        metrics = [row for row in Metrics.read(Path(folder) / "run" / "metrics.jsonl") if "time/step_s" in row]
    estimated = estimates(plan, together=executor == "local")
    measured = {role: max(row[f"memory/{role}_gib"] for row in metrics[1:]) for role in estimated}
    return {
        "executor": executor,
        "offload": offload,
        "parameters": plan.parameters,
        "estimated_gib": estimated,
        "measured_gib": measured,
        "of_measured": {role: estimated[role] / measured[role] for role in estimated},
        "step_s": statistics.median(row["time/step_s"] for row in metrics[1:]),
        "generate_s": statistics.median(row["time/generate_s"] for row in metrics[1:]),
    }


def estimates(plan: Any, together: bool) -> dict[str, float]:
    """The plan's peak of each worker's process on the GPU, over all stages; `together`: of the one process of all."""
    peaks: dict[str, float] = {}
    for (pool, _stage), parts in plan.memory.parts.items():
        if not pool.name.startswith("gpu"):
            continue
        here: dict[str, float] = {}
        for part in parts:
            role = "actor_train" if together else part.worker.partition("[")[0]
            here[role] = here.get(role, 0.0) + part.bytes / 2**30
        peaks = {role: max(peaks.get(role, 0.0), here.get(role, 0.0)) for role in {*peaks, *here}}
    return peaks


def fresh(model: str, large: bool, folder: Path) -> str:
    """A model folder with fresh bf16 weights, in the model's shape or in that of Qwen2.5-1.5B, and its tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from roll.model.find import find_model

    location = model if Path(model).is_dir() else find_model(model).location
    shape = AutoConfig.from_pretrained(location)
    if large:
        shape.hidden_size, shape.intermediate_size, shape.num_hidden_layers = 1536, 8960, 28
        shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim = 12, 2, 128
    with torch.device("cuda"):
        AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(location).save_pretrained(folder)
    return str(folder)


def table(rows: list[dict[str, Any]]) -> None:
    print("| executor | offload | process | estimated GiB | measured GiB | ratio | s per step |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        if "error" in row:
            print(f"| {row['executor']} | {row['offload']} | failed: {row['error']} |")
            continue
        for role, estimated in row["estimated_gib"].items():
            ratio = row["of_measured"][role]
            print(
                f"| {row['executor']} | {row['offload']} | {role if row['executor'] == 'ray' else 'all roles'} "
                f"| {estimated:.2f} | {row['measured_gib'][role]:.2f} | {ratio:.2f} | {row['step_s']:.2f} |"
            )


if __name__ == "__main__":
    main()
