"""Tokens a second of the embedded engine, vLLM and `transformers.generate` on the same requests, in one run.

Two workloads of prompts of equal length and log-normal numbers of new tokens; ends of text are ignored, so that lengths
are forced:

- `distinct`: prompts that share nothing;
- `siblings`: groups of 8 equal prompts, as in GRPO. Prompts are random tokens, so siblings share nothing after them.

On CUDA 256 requests of 128 tokens, the longest answer 1,024; on a CPU 64 requests of 32, the longest 192. Engines take
turns, and each repeat has prompts of its own, so that nothing cached is of use to the next. The best of the repeats is
taken, after a short warm-up. Sampling at temperature 1 with log-probs (`generate` without them).

With `--clock cpu --threads 1` tokens/s are those of a CPU second: on a machine that others use too, ratios of wall times
are chance. Step and first-token times are always wall times.

`of_floor` is the share of the least time this machine can take for the workload (see `engine_work.Floor`). vLLM is used
if this interpreter has it, or that of `--vllm-python`.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
from common import parser, report
from engine_peers import Generate, Vllm, vllm_python
from engine_work import Floor, Outcome, Sizes, Workload, make_workload, read_clock

from roll.engine.factory import make_engine
from roll.engine.request import Request, SamplingParams, seed_of
from roll.model import attention
from roll.model.find import find_model
from roll.model.loading import choose_dtype, in_precision, load_model
from roll.model.rope import longest_sequence
from roll.model.tiny import character_tokenizer

SIZES = {"cpu": Sizes(64, 32, 192), "cuda": Sizes(256, 128, 1024)}
MIXTURES: dict[str, tuple[Any, Any]] = {
    "moe-1b": (  # 1.2B parameters, of which a token uses 0.3B
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(
            vocab_size=151936, hidden_size=1024, num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=4,
            head_dim=64, num_experts=32, moe_intermediate_size=512, num_experts_per_tok=4, norm_topk_prob=True,
            max_position_embeddings=32768, tie_word_embeddings=False,
        ),
    ),
}  # fmt: skip
PROFILED_STEPS = 20


class Runner(Protocol):
    def run(self, work: Workload) -> Outcome: ...


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--device", choices=SIZES, default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument(
        "--model", default="smollm2-135m", help="or shape:smollm2-135m, shape:qwen2.5-1.5b, shape:moe-1b: random weights"
    )
    options.add_argument("--dtype", choices=["auto", "bf16", "fp32"], default="auto")
    options.add_argument("--sequences", type=int)
    options.add_argument("--prompt", type=int, help="tokens of a prompt")
    options.add_argument("--longest", type=int, help="most new tokens")
    options.add_argument("--engines", default="native,vllm,generate")
    options.add_argument("--workloads", default="distinct,siblings")
    options.add_argument("--repeats", type=int, default=2)
    options.add_argument(
        "--clock", choices=["wall", "cpu"], default="wall", help="cpu: tokens a CPU second, on a shared machine"
    )
    options.add_argument("--vllm-python", help="an interpreter that has vLLM (default: this one, if it has)")
    options.add_argument("--vllm-compile", action="store_true", help="let vLLM compile on a CPU (on CUDA it always does)")
    options.add_argument("--profile", action="store_true", help="print where the native engine's steps spend their time")
    args = options.parse_args()
    torch.set_num_threads(args.threads)

    default = SIZES[args.device]
    sizes = Sizes(args.sequences or default.sequences, args.prompt or default.prompt, args.longest or default.longest)
    dtype = choose_dtype(args.dtype, args.device)
    model = build_model(args.model, args.device, dtype)
    works = args.workloads.split(",")
    if args.profile:
        profile(Native(model, sizes.sequences), make_workload(works[0], sizes, model.config.vocab_size, 0), args.device)
        return

    engines: dict[str, Runner] = {}
    for name in args.engines.split(","):
        if name == "native":
            engines[name] = Native(model, sizes.sequences)
        elif name == "generate":
            engines[name] = Generate(plain(model))
        elif python := vllm_python(args.vllm_python):
            engines[name] = vllm(python, args, model, sizes)
    result: dict[str, object] = {"model": args.model, "dtype": str(dtype), "threads": args.threads}
    result |= measure(engines, works, sizes, model, args.repeats, args.clock)
    for engine in engines.values():
        if isinstance(engine, Vllm):
            engine.close()
    if args.json:
        report(result, True)


def measure(
    engines: dict[str, Runner], works: list[str], sizes: Sizes, model: Any, repeats: int, clock: str
) -> dict[str, object]:
    vocab = model.config.vocab_size
    floor = Floor(model, clock)
    result: dict[str, object] = {"copy_gb_per_s": floor.copy_bandwidth / 1e9}
    for engine in engines.values():
        engine.run(make_workload("distinct", Sizes(sizes.sequences, sizes.prompt, 8), vocab, 10_000))
    for name in works:
        work = make_workload(name, sizes, vocab, 0, clock)
        best: dict[str, Outcome] = {}
        for repeat in range(repeats):
            for engine, runner in engines.items():
                outcome = runner.run(make_workload(name, sizes, vocab, repeat, clock))
                print(
                    f"{name} {repeat} {engine}: {work.tokens / outcome.seconds:.1f} tokens/s", file=sys.stderr, flush=True
                )
                if engine not in best or outcome.seconds < best[engine].seconds:
                    best[engine] = outcome
        floor_s = floor.seconds(work)
        rows = {engine: outcome.row(work, floor_s, floor.bytes_per_token) for engine, outcome in best.items()}
        print_table(work, rows, floor_s)
        prefix = "" if name == "distinct" else f"{name}_"
        result |= {f"{name}_{e}_{key}": value for e, row in rows.items() for key, value in row.items()}
        if "native" in rows:
            result[f"{prefix}of_floor"] = rows["native"]["of_floor"]
            for other in rows.keys() - {"native"}:
                ratio = rows["native"]["tokens_per_s"] / rows[other]["tokens_per_s"]
                result[f"{prefix}native_over_{other}"] = ratio
                print(f"native over {other}: {ratio:.2f}")
    return result


def print_table(work: Workload, rows: dict[str, dict[str, float]], floor_s: float) -> None:
    count = (
        f"{len(work.prompts)} requests of {len(work.prompts[0])} tokens, {work.tokens} new ones, longest {work.longest}"
    )
    print(f"\n{work.name}: {count}; at least {floor_s:.2f} s")
    print(
        "| engine | tokens/s | step ms, median | step ms, p95 | first token s, mean | KV tokens, peak | MB | of floor |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for engine, row in rows.items():
        figures = (f"{row['tokens_per_s']:.1f}", f"{row['step_median_ms']:.1f}", f"{row['step_p95_ms']:.1f}",
                   f"{row['first_token_mean_s']:.2f}", f"{row['peak_cached_tokens']:.0f}", f"{row['peak_cached_mb']:.0f}",
                   f"{row['of_floor']:.2f}")  # fmt: skip
        print(f"| {engine} | " + " | ".join(figures).replace("nan", "") + " |", flush=True)


def build_model(name: str, device: str, dtype: torch.dtype) -> Any:
    """The model with its attention behind plans, ready for the engine."""
    if not name.startswith("shape:"):
        return load_model(find_model(name), dtype, 0).to(device)
    from train_step import SHAPES

    kind, config = {**SHAPES, **MIXTURES}[name.removeprefix("shape:")]
    with torch.device(device):
        model = in_precision(kind(config), dtype).eval()
    model.set_attn_implementation(attention.NAME)
    return model


def plain(model: Any) -> Any:
    """A copy with the attention of `transformers`."""
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("sdpa")
    return twin


def vllm(python: str, args: Any, model: Any, sizes: Sizes) -> Vllm:
    options = {
        "device": args.device,
        "dtype": str(model.dtype).removeprefix("torch."),
        "enforce_eager": args.device == "cpu" and not args.vllm_compile,
        "max_num_seqs": sizes.sequences,
        "max_model_len": min(longest_sequence(model.config), 2 * (sizes.prompt + sizes.longest)),
    }
    if args.device == "cuda":
        options["gpu_memory_utilization"] = 0.4
    if args.model.startswith("shape:"):
        folder = tempfile.mkdtemp()
        model.config.architectures = [type(model).__name__]  # or vLLM guesses, and may take it for a classifier
        model.config.save_pretrained(folder)
        character_tokenizer().save_pretrained(folder)  # which some families must have, and nothing uses
        options |= {"model": folder, "load_format": "dummy", "skip_tokenizer_init": False}
    else:
        options["model"] = str(find_model(args.model).location)
    return Vllm(python, options, args.threads)


class Native:
    def __init__(self, model: Any, max_running: int) -> None:
        self._engine = make_engine(model, character_tokenizer(), max_running=max_running)
        self._served = 0

    def run(self, work: Workload) -> Outcome:
        started, began = time.perf_counter(), read_clock(work.clock)
        heard = self.start(work)
        steps: list[float] = []
        first: list[float] = []
        peak = tokens = 0
        while self._engine.has_work:
            before = time.perf_counter()
            finished = self._engine.step()
            steps.append(time.perf_counter() - before)
            peak = max(peak, self._engine.stats().cached_tokens)
            if heard:
                begun = [done.id for done in finished] + [told.id for told in self._engine.progress({})]
                first += [time.perf_counter() - started] * len(heard.intersection(begun))
                heard.difference_update(begun)
            tokens += sum(len(done.ids) for done in finished)
        assert tokens == work.tokens, f"the engine made {tokens} of {work.tokens} tokens"
        return Outcome(read_clock(work.clock) - began, steps, first, peak)

    def start(self, work: Workload) -> set[str]:
        ids: set[str] = set()
        for prompt, new in zip(work.prompts, work.new_tokens, strict=True):
            self._served += 1
            ids.add(str(self._served))
            sampling = SamplingParams(new, seed=seed_of(self._served))
            self._engine.add(Request(str(self._served), np.array(prompt, np.int32), sampling))
        return ids

    def step(self) -> None:
        self._engine.step()


def profile(native: Native, work: Workload, device: str) -> None:
    """Where steps spend their time once all prompts are in: by kernel on CUDA, by op on a CPU."""
    cuda = device == "cuda"
    native.start(work)
    for _ in range(PROFILED_STEPS):
        native.step()
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * cuda
    for profiled in (False, True):
        with torch.profiler.profile(activities=activities) if profiled else _Nothing() as found:
            started = time.perf_counter()
            for _ in range(PROFILED_STEPS):
                native.step()
            if cuda:
                torch.cuda.synchronize()
            wall = time.perf_counter() - started
        if not profiled:
            print(f"a step without the profiler: {1e3 * wall / PROFILED_STEPS:.2f} ms")
            continue
        events = found.key_averages()
        inside = sum(e.self_device_time_total if cuda else e.self_cpu_time_total for e in events) / 1e6
        step_ms, inside_ms = 1e3 * wall / PROFILED_STEPS, 1e3 * inside / PROFILED_STEPS
        where = "kernels" if cuda else "ops"
        print(f"a step: {step_ms:.2f} ms, {inside_ms:.2f} of it in {where}, {step_ms - inside_ms:.2f} between them")
        print(events.table(sort_by="self_device_time_total" if cuda else "self_cpu_time_total", row_limit=25))


class _Nothing:
    def __enter__(self) -> Any: ...

    def __exit__(self, *_: object) -> None: ...


if __name__ == "__main__":
    main()
