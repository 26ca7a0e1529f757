"""How far sampler and trainer differ in a mixture of experts, with router replay and without.

`python docs/results/router_replay.py models FOLDER SEED` writes three models from scratch, with the tokenizer of `tiny`:
FOLDER/mixture, FOLDER/dense (as many parameters) and FOLDER/dense_active (as many as the mixture uses per token);
`… gather RUN [RUN …]` puts what is shown of runs named KIND-SEED into router_replay.csv;
`… draw` makes router_replay.png of it, and prints a table.
"""

from __future__ import annotations

import csv
import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

HERE = Path(__file__).parent
TABLE = HERE / "router_replay.csv"
EXPERTS, CHOSEN, INNER = 16, 2, 256
METRICS = ("train/rollout_logprob_diff", "train/rollout_kl", "train/rollout_logprob_diff_max", "reward/mean")
LOWEST = {"train/rollout_logprob_diff": 1e-5, "train/rollout_kl": 1e-7}
"""Where the vertical axes begin: policies that have become certain differ by anything below."""
KINDS = {
    "mixture": "mixture, without replay",
    "mixture_replay": "mixture, with replay",
    "dense": "dense, as many parameters",
    "dense_active": "dense, as many as a token uses",
}


def write_models(folder: Path, seed: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from roll.model.tiny import character_tokenizer

    tokenizer = character_tokenizer()
    for name, config in _configs(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id).items():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        print(f"{folder / name}: {sum(p.numel() for p in model.parameters()):,} parameters")


def _configs(vocabulary: int, end: int, padding: int) -> dict[str, PretrainedConfig]:
    from transformers import Qwen3Config, Qwen3MoeConfig

    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "initializer_range": 0.06,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": padding,
    }
    experts = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "norm_topk_prob": True}
    return {
        "mixture": Qwen3MoeConfig(**sizes, **experts, moe_intermediate_size=INNER, intermediate_size=INNER),
        "dense": Qwen3Config(**sizes, intermediate_size=EXPERTS * INNER),
        "dense_active": Qwen3Config(**sizes, intermediate_size=CHOSEN * INNER),
    }


def gather(runs: list[Path]) -> None:
    with TABLE.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["kind", "seed", "step", *METRICS])
        for run in runs:
            kind, seed = run.name.rsplit("-", 1)
            for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
                if METRICS[0] in row:
                    table.writerow([kind, seed, row["step"], *(f"{row[metric]:.4g}" for metric in METRICS)])


def draw() -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = _read()
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.2))
    shown = {
        "train/rollout_logprob_diff": "mean difference of a token's log-prob",
        "train/rollout_kl": "KL of trainer and sampler (k3)",
    }
    for axes, (metric, label) in zip(panels, shown.items(), strict=True):
        for number, (kind, name) in enumerate(KINDS.items()):
            steps = _by_step(runs, kind, metric)
            middle = [fmean(values) for values in steps.values()]
            axes.plot(list(steps), middle, color=f"C{number}", label=name)
            axes.fill_between(list(steps), *zip(*((min(v), max(v)) for v in steps.values()), strict=True), alpha=0.15)
        axes.set(xlabel="step", ylabel=label, yscale="log")
        axes.set_ylim(bottom=LOWEST[metric])
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize=8)
    figure.suptitle("Sampler and trainer in bf16: means of three seeds, and the range")
    figure.tight_layout()
    figure.savefig(HERE / "router_replay.png", dpi=110)
    print("| model | mean difference | KL (k3) | largest difference per step | mean difference by seed |")
    print("| --- | --- | --- | --- | --- |")
    for kind, name in KINDS.items():
        seeds = [
            [fmean(float(row[metric]) for row in rows) for metric in METRICS]
            for (k, _), rows in runs.items()
            if k == kind
        ]
        means = [f"{fmean(seed[column] for seed in seeds):.2g}" for column in range(3)]
        print(f"| {name} | {' | '.join(means)} | {', '.join(f'{seed[0]:.2g}' for seed in seeds)} |")


def _read() -> dict[tuple[str, str], list[dict[str, str]]]:
    runs: dict[tuple[str, str], list[dict[str, str]]] = defaultdict(list)
    with TABLE.open(newline="") as file:
        for row in csv.DictReader(file):
            runs[row["kind"], row["seed"]].append(row)
    return runs


def _by_step(runs: dict[tuple[str, str], list[dict[str, str]]], kind: str, metric: str) -> dict[int, list[float]]:
    steps: dict[int, list[float]] = defaultdict(list)
    for (found, _), rows in runs.items():
        for row in rows:
            if found == kind:
                steps[int(row["step"])].append(float(row[metric]))
    return dict(sorted(steps.items()))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["models", folder, seed]:
            write_models(Path(folder), int(seed))
        case ["gather", *names] if names:
            gather([Path(name) for name in names])
        case ["draw"]:
            draw()
        case _:
            sys.exit(__doc__)
