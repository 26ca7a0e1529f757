"""Tokens a second of the embedded engine beside `transformers.generate`, on the CPU, in one run.

Two workloads, the same requests for both engines, lengths forced by ignoring the end-of-text token:

- `distinct`: prompts that share nothing but the chat template's frame, so that no work can be shared;
- `siblings`: groups of equal prompts, as in GRPO, where the engine computes a prompt once.

`generate` runs one static batch, sorted by nothing: every request has the same length, which suits it best.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
from common import parser, report

from roll.config import ModelConfig
from roll.engine.engine import Engine
from roll.engine.request import Request, Sampling, seed_of
from roll.model.chat import ChatRenderer
from roll.model.loading import choose_dtype, find_model, load_model, load_tokenizer, stop_ids_of

WORDS = ("river", "stone", "cloud", "paper", "garden", "winter", "copper", "music", "engine", "window", "silver")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", default="smollm2-135m")
    options.add_argument("--sequences", type=int, default=32)
    options.add_argument("--new-tokens", type=int, default=32)
    options.add_argument("--repeats", type=int, default=2, help="the best of so many is taken")
    args = options.parse_args()
    torch.set_num_threads(args.threads)

    source = find_model(args.model)
    dtype = choose_dtype("auto")
    tokenizer = load_tokenizer(source, ModelConfig())
    renderer = ChatRenderer(tokenizer, stop_ids_of(tokenizer, source))
    ours = load_model(source, dtype, 0)
    theirs = AutoModelForCausalLM.from_pretrained(source.location, dtype=dtype, attn_implementation="sdpa").eval()

    result: dict[str, object] = {"model": args.model, "dtype": str(dtype), "threads": args.threads}
    for workload, distinct in (("distinct", args.sequences), ("siblings", max(args.sequences // 8, 1))):
        prompts = make_prompts(renderer, distinct, args.sequences)
        tokens = args.sequences * args.new_tokens
        native = min(run_native(ours, tokenizer, prompts, args.new_tokens) for _ in range(args.repeats))
        generate = min(run_generate(theirs, tokenizer, prompts, args.new_tokens) for _ in range(args.repeats))
        result[f"{workload}_native_tokens_per_s"] = tokens / native
        result[f"{workload}_generate_tokens_per_s"] = tokens / generate
        result[f"{workload}_native_over_generate"] = generate / native
    report(result, args.json)


def make_prompts(renderer: ChatRenderer, distinct: int, sequences: int) -> list[list[int]]:
    rng = random.Random(0)
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(8, 24))) for _ in range(distinct)]
    texts = [texts[i * distinct // sequences] for i in range(sequences)]
    return [renderer.opening([{"role": "user", "content": f"Write a story about {text}."}]) for text in texts]


def run_native(model: object, tokenizer: object, prompts: list[list[int]], new_tokens: int) -> float:
    engine = Engine(model, tokenizer, max_running=len(prompts))  # type: ignore[arg-type]
    for i, prompt in enumerate(prompts):
        engine.add(Request(str(i), np.array(prompt, np.int32), Sampling(new_tokens, seed=seed_of(i))))
    started, finished = time.perf_counter(), 0
    while engine.has_work:
        finished += len(engine.step())
    assert finished == len(prompts)
    return time.perf_counter() - started


@torch.inference_mode()
def run_generate(model: object, tokenizer: object, prompts: list[list[int]], new_tokens: int) -> float:
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), tokenizer.pad_token_id or 0)  # type: ignore[attr-defined]
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    started = time.perf_counter()
    out = model.generate(  # type: ignore[attr-defined]
        ids, attention_mask=mask, do_sample=True, top_k=0, min_new_tokens=new_tokens, max_new_tokens=new_tokens
    )
    assert out.shape[1] == longest + new_tokens
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
