"""What a turn of many conversations costs an engine by itself: the embedded one and vLLM on the same turns, in one run.

Every conversation begins with a prompt; each of its turns adds an observation and draws a few tokens, as an agent does in
a game. Whatever came before is in the engines' caches. All conversations take a turn at once, and the next turn begins
when all have answered: `benchmarks/turns.py` has the whole of a turn, with environments and everything around it.

Tokens are random. An answer is drawn and another one put in its place: its own length is always computed again, by both.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from common import parser, report
from engine import Native, Runner, build_model, vllm
from engine_peers import Vllm, vllm_python
from engine_work import Sizes, Workload

from roll.model.loading import choose_dtype


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--model", default="smollm2-135m")
    options.add_argument("--dtype", choices=["auto", "bf16", "fp32"], default="auto")
    options.add_argument("--conversations", type=int, default=256)
    options.add_argument("--turns", type=int, default=16)
    options.add_argument("--prompt", type=int, default=150, help="tokens that a conversation begins with")
    options.add_argument("--observation", type=int, default=60, help="tokens that a turn adds")
    options.add_argument("--answer", type=int, default=2, help="tokens that a turn draws")
    options.add_argument("--engines", default="native,vllm")
    options.add_argument("--vllm-python", help="an interpreter that has vLLM (default: this one, if it has)")
    options.add_argument("--vllm-compile", action="store_true", help="let vLLM compile on a CPU (on CUDA it always does)")
    args = options.parse_args()
    torch.set_num_threads(args.threads)

    dtype = choose_dtype(args.dtype, args.device)
    model = build_model(args.model, args.device, dtype)
    longest = args.prompt + args.turns * (args.observation + args.answer)
    engines: dict[str, Runner] = {}
    if "native" in args.engines:
        engines["native"] = Native(model, args.conversations)
    if "vllm" in args.engines and (python := vllm_python(args.vllm_python)):
        engines["vllm"] = vllm(python, args, model, Sizes(args.conversations, longest, args.answer))
    print("| engine | ms a turn of all | ms of the first | ms of the last | turns/s |")
    print("| --- | --- | --- | --- | --- |")
    turn_ms: dict[str, float] = {}
    for name, engine in engines.items():
        play(engine, args, model.config.vocab_size, 0)  # to warm up
        played = 1e3 * np.array(play(engine, args, model.config.vocab_size, 1))
        turn_ms[name] = float(played.mean())
        figures = (
            f"{turn_ms[name]:.1f} | {played[0]:.1f} | {played[-1]:.1f} | {1e3 * args.conversations / turn_ms[name]:.0f}"
        )
        print(f"| {name} | {figures} |", flush=True)
        if isinstance(engine, Vllm):
            engine.close()
    result: dict[str, object] = {"model": args.model, "dtype": str(dtype), "threads": args.threads}
    result |= {f"{name}_ms_a_turn": ms for name, ms in turn_ms.items()}
    if len(turn_ms) == 2:
        result["native_over_vllm"] = turn_ms["vllm"] / turn_ms["native"]
        print(f"native over vllm: {result['native_over_vllm']:.2f}")
    if args.json:
        report(result, True)


def play(engine: Runner, args: Any, vocab: int, seed: int) -> list[float]:
    """Seconds of each turn, of all conversations together; the first has all of their prompts to compute."""
    rng = np.random.default_rng(seed)
    count = args.conversations
    said = rng.integers(0, vocab, (count, args.prompt))
    found: list[float] = []
    for _ in range(args.turns):
        answers = [args.answer] * count
        found.append(engine.run(Workload("turn", said.tolist(), answers)).seconds)
        more = args.answer + args.observation
        said = np.concatenate([said, rng.integers(0, vocab, (count, more))], axis=1)
    return found


if __name__ == "__main__":
    main()
