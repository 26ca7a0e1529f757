"""Tokens a second, MFU and peak memory of the trainer's log-probs and update, beside a plain loop, in one run.

The batch is ragged: prompts of 128 to 256 tokens, all different, and answers of log-normal length (mean about 300, at
most 1024). First the gradients of both on a small batch are held against those in fp32. Then each is timed; of the plain
loop, the fastest micro-batch among the largest that fit.

MFU = FLOPs / seconds / peak, with FLOPs of an update = 3 × (2 × weights of the layers × rows + 2 × vocabulary × width ×
predicted rows + 4 × layers × heads × head size × pairs of a row and what it attends to). Padding, prompts in the output
layer and what is computed twice count as nothing. Peak: 989 TFLOP/s, an H200's in dense bf16.

The gain of prefix sharing is measured on groups of 8 with prompts as long as answers, with sharing and without.
`--variants 'compile=off' 'head=compiled'` times further settings of `train` (and of the kernels over the vocabulary).
"""

from __future__ import annotations

import copy
import gc
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
from common import parser, report
from plain_loop import CLIP, PlainLoop

from roll.algorithm import LossSpec
from roll.config.schema import TrainConfig
from roll.data import Batch, Sample, Task
from roll.model import attention
from roll.model.loading import in_precision
from roll.model.tiny import character_tokenizer
from roll.strategy.train import logprobs, vocabulary
from roll.strategy.train.optimizer import OptimizerStep
from roll.strategy.train.packing import pack
from roll.strategy.train.single import SingleStrategy

PEAK_FLOPS = 989e12
LOSS = LossSpec("clipped", {"clip_low": CLIP, "clip_high": CLIP})
LR = 1e-6
Gradients = dict[str, Tensor]

SHAPES: dict[str, tuple[Any, Any]] = {
    "tiny": (
        LlamaForCausalLM,
        LlamaConfig(
            vocab_size=4096, hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6,
            num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True,
        ),
    ),
    "smollm2-135m": (
        LlamaForCausalLM,
        LlamaConfig(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
            num_key_value_heads=3, max_position_embeddings=8192, rope_theta=100000.0, tie_word_embeddings=True,
        ),
    ),
    "qwen2.5-1.5b": (
        Qwen2ForCausalLM,
        Qwen2Config(
            vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
            num_key_value_heads=2, max_position_embeddings=32768, rope_theta=1000000.0, tie_word_embeddings=True,
        ),
    ),
}  # fmt: skip


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    options.add_argument("--tokens", type=int, default=0, help="tokens of the batch (default: 65536, on a CPU 4096)")
    options.add_argument("--repeats", type=int, default=3, help="the best of so many is taken")
    options.add_argument("--variants", nargs="*", default=[], help="further settings to time: key=value,key=value")
    options.add_argument("--parts", default="check,ours,plain,sharing", help="which parts to run")
    options.add_argument("--profile", action="store_true", help="print where an update spends its time")
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    parts = args.parts.split(",")
    bench = Bench(args.shape, args.device, args.tokens or (65536 if args.device == "cuda" else 4096), args.repeats)
    result: dict[str, object] = {"shape": args.shape, "device": bench.device_name, "dtype": str(bench.dtype)}
    works: list[tuple[str, Callable[[], dict[str, object]]]] = [
        ("check", bench.check),
        ("ours", lambda: bench.compare("plain" in parts)),
        ("sharing", bench.sharing),
    ]
    for name, work in works:
        if name in parts:
            result |= said(name, work())
    for text in args.variants:
        found = said(text, bench.variant(text, profiled=args.profile))
        result |= {f"{text}: {name}": value for name, value in found.items()}
    if args.profile:
        bench.variant("", profiled=True)
    report(result, args.json)
    for name in ("gradient_error", "gradient_error_unshared"):
        if name in result and float(str(result[name])) > float(str(result["gradient_error_allowed"])):
            sys.exit(f"{name} is {result[name]}, allowed are {result['gradient_error_allowed']}")


def said(name: str, found: dict[str, object]) -> dict[str, object]:
    """Figures at once on the error stream: a later part may take long or fail."""
    print(f"{name}: {found}", file=sys.stderr, flush=True)
    return found


class Bench:
    def __init__(self, shape: str, device: str, tokens: int, repeats: int) -> None:
        self.device = torch.device(device)
        self.dtype = torch.bfloat16 if device == "cuda" or _cpu_has_bf16() else torch.float32
        self.device_name = torch.cuda.get_device_name() if device == "cuda" else f"cpu, {torch.get_num_threads()} threads"
        self._kind, self._config = SHAPES[shape]
        self._repeats = repeats
        self._vocab = self._config.vocab_size
        self._ragged = make_batch(tokens, self._vocab)
        self._grouped = make_batch(tokens, self._vocab, group_size=8)

    def check(self) -> dict[str, object]:
        """Relative distance of the gradients to those in fp32."""
        small = make_batch(3000 if self.device.type == "cuda" else 500, self._vocab, group_size=2)
        exact = self._plain_gradients(small, torch.float32)
        found: dict[str, object] = {"gradient_error_allowed": 1e-3}
        if self.dtype != torch.float32:
            plain = distance(self._plain_gradients(small, self.dtype), exact)
            found |= {"plain_gradient_error": plain, "gradient_error_allowed": 1.25 * plain}
        for name, share in (("gradient_error", True), ("gradient_error_unshared", False)):
            found[name] = distance(self._our_gradients(small, share), exact)
        return found

    def compare(self, with_plain: bool) -> dict[str, object]:
        """Ours and the plain loop on the ragged batch. On a CPU they take turns, because its speed wavers."""
        rows = pack(self._ragged.rows("ids")).rows
        found: dict[str, object] = {"tokens": self._ragged.tokens, "rows": rows, "samples": len(self._ragged)}
        ours = Ours(self, self._ragged, {})
        if self.device.type == "cuda":
            mine = self._timed([ours])[0]
            found |= self._figures("", mine, self._ragged)
            del ours
            self._let_go()
            if not with_plain:
                return found
            theirs = [self._plain_timed(tokens, mask) for tokens, mask in self._plain_sizes()]
            theirs = [times for times in theirs if times is not None]
        else:
            loops = [Plain(self, self._ragged, tokens, mask) for tokens in (1024, 2048) for mask in (False,)]
            mine, *theirs = self._timed([ours, *loops] if with_plain else [ours])
            found |= self._figures("", mine, self._ragged)
        if theirs:
            best = min((times for times in theirs if times is not None), key=lambda times: times["update_s"])
            found |= self._figures("plain_", best, self._ragged)
            found["over_plain_loop"] = best["update_s"] / mine["update_s"]
            found["over_plain_loop_log_probs"] = best["log_probs_s"] / mine["log_probs_s"]
        return found

    def sharing(self) -> dict[str, object]:
        """An update of groups of 8, a shared prompt computed once or eight times."""
        contestants = [Ours(self, self._grouped, {"share_prefixes": share}) for share in (True, False)]
        shared, separate = self._timed(contestants)
        rows = pack(self._grouped.rows("ids")).rows
        return {
            "grouped_tokens": self._grouped.tokens,
            "grouped_rows": rows,
            "shared_update_s": shared["update_s"],
            "separate_update_s": separate["update_s"],
            "prefix_sharing_gain": separate["update_s"] / shared["update_s"],
            "prefix_sharing_gain_log_probs": separate["log_probs_s"] / shared["log_probs_s"],
        }

    def variant(self, text: str, profiled: bool) -> dict[str, object]:
        settings: dict[str, Any] = {key: _value(value) for key, value in _pairs(text)}
        original = vocabulary.kernels_for
        if head := settings.pop("head", None):
            logprobs.kernels_for = lambda device: HEADS[head]()
        batch = self._grouped if settings.pop("batch", "") == "grouped" else self._ragged
        ours = Ours(self, batch, settings)
        found = self._figures("", self._timed([ours])[0], batch)
        if profiled:
            print(f"--- {text or 'as it is'}")
            print(profile(ours.update, self.device))
        logprobs.kernels_for = original
        del ours
        self._let_go()
        return found

    def model(self, dtype: torch.dtype, attention_name: str) -> PreTrainedModel:
        torch.manual_seed(0)
        with self.device:
            made: PreTrainedModel = in_precision(self._kind(copy.deepcopy(self._config)), dtype).eval()
        made.set_attn_implementation(attention_name)
        return made

    def _our_gradients(self, batch: Batch, share: bool) -> Gradients:
        strategy = Ours(self, batch, {"share_prefixes": share}).strategy
        optimizer, found = strategy._optimizer, {}
        assert optimizer is not None

        def keep(step: int, loss: Tensor | None = None) -> OptimizerStep:
            found.update({name: gradient.float() for name, gradient in optimizer.gradients().items()})
            return OptimizerStep(1.0, applied=True)

        optimizer.step = keep  # type: ignore[method-assign]
        strategy.update(batch, LOSS, 0)
        return found

    def _plain_gradients(self, batch: Batch, dtype: torch.dtype) -> Gradients:
        loop = PlainLoop(self.model(dtype, "sdpa"), LR, padded_tokens=2048)
        loop.backward(batch)
        return {name: p.grad.float() for name, p in loop.model.named_parameters() if p.grad is not None}

    def _plain_sizes(self) -> list[tuple[int, bool]]:
        """The largest that fit and their halves; right padding needs no mask, and is faster without."""
        found: list[tuple[int, bool]] = []
        for tokens in (131072, 65536, 32768, 16384, 8192, 4096):
            if len(found) < 4 and self._plain_timed(tokens, False, once=True) is not None:
                found += [(tokens, False), (tokens, True)]
        return found

    def _plain_timed(self, tokens: int, mask: bool, once: bool = False) -> dict[str, Any] | None:
        self._let_go()
        try:
            plain = Plain(self, self._ragged, tokens, mask)
            if once:
                plain.update()
                torch.cuda.synchronize()
                return {}
            times = self._timed([plain])[0]
            print(f"plain loop, {tokens} padded tokens, mask {mask}: {times}", file=sys.stderr)
            return times
        except torch.OutOfMemoryError:
            return None
        finally:
            plain = None

    def _timed(self, contestants: list[Ours | Plain]) -> list[dict[str, Any]]:
        """The best of several rounds of each, taking turns; the first round, which compiles, is timed apart."""
        found: list[dict[str, Any]] = []
        for contestant in contestants:
            self._reset_peak()
            first = [self._seconds(work) for work in (contestant.log_probs, contestant.update)]
            found.append({"first_s": sum(first), "log_probs_s": np.inf, "update_s": np.inf, "peak_bytes": self._peak()})
        for _ in range(self._repeats):
            for contestant, times in zip(contestants, found, strict=True):
                times["log_probs_s"] = min(times["log_probs_s"], self._seconds(contestant.log_probs))
                times["update_s"] = min(times["update_s"], self._seconds(contestant.update))
        for contestant, times in zip(contestants, found, strict=True):
            times["settings"] = str(contestant)
        return found

    def _figures(self, prefix: str, times: dict[str, Any], batch: Batch) -> dict[str, object]:
        forward = forward_flops(self._config, batch)
        return {
            f"{prefix}settings": times["settings"],
            f"{prefix}first_s": times["first_s"],
            f"{prefix}log_probs_s": times["log_probs_s"],
            f"{prefix}update_s": times["update_s"],
            f"{prefix}log_probs_tokens_per_s": batch.tokens / times["log_probs_s"],
            f"{prefix}update_tokens_per_s": batch.tokens / times["update_s"],
            f"{prefix}tflops": 3 * forward / times["update_s"] / 1e12,
            f"{prefix}mfu": 3 * forward / times["update_s"] / PEAK_FLOPS,
            f"{prefix}mfu_log_probs": forward / times["log_probs_s"] / PEAK_FLOPS,
            f"{prefix}peak_bytes": times["peak_bytes"],
        }

    def _seconds(self, work: Callable[[], object]) -> float:
        started = time.perf_counter()
        work()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    def _peak(self) -> int:
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated())
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

    def _reset_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def _let_go(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


class Ours:
    """ROLL's trainer with some settings of `train`."""

    def __init__(self, bench: Bench, batch: Batch, settings: dict[str, Any]) -> None:
        self._batch = batch
        model = bench.model(bench.dtype, attention.NAME)
        self.strategy = SingleStrategy(model, character_tokenizer(), TrainConfig(lr=LR, **settings))

    def __str__(self) -> str:
        return str(self.strategy._runner.budget(self._batch))

    def log_probs(self) -> None:
        self.strategy.log_probs(self._batch)

    def update(self) -> None:
        self.strategy.update(self._batch, LOSS, 0)


class Plain:
    def __init__(self, bench: Bench, batch: Batch, padded_tokens: int, mask: bool) -> None:
        self._batch = batch
        self._loop = PlainLoop(bench.model(bench.dtype, "sdpa"), LR, padded_tokens, mask)
        self._mask = mask

    def __str__(self) -> str:
        return f"{self._loop.padded_tokens} padded tokens, {'with' if self._mask else 'without'} a mask"

    def log_probs(self) -> None:
        self._loop.log_probs(self._batch)

    def update(self) -> None:
        self._loop.update(self._batch)


def make_batch(tokens: int, vocab: int, group_size: int = 1) -> Batch:
    """About so many tokens. In groups, a prompt is as long as its group's mean answer."""
    rng = np.random.default_rng(0)
    samples: list[Sample] = []
    total, group = 0, 0
    while total < tokens:
        lengths = np.clip(rng.lognormal(np.log(300) - 0.32, 0.8, group_size), 8, 1024).astype(int)
        size = int(lengths.mean()) if group_size > 1 else int(rng.integers(128, 257))
        prompt = rng.integers(0, vocab, size).tolist()
        for n, length in enumerate(lengths.tolist()):
            sample = Sample(f"{group}.{n}", Task.ask("t", "?"), group, 1.0)
            sample.log.prompt(prompt)
            sample.log.respond(rng.integers(0, vocab, length).tolist(), np.full(length, -10.0), [0] * length)
            samples.append(sample)
            total += size + length
        group += 1
    batch = Batch.from_samples(samples)
    return batch.with_columns(advantage=rng.normal(0, 1, len(batch)))


def forward_flops(config: Any, batch: Batch) -> float:
    """FLOPs of a forward pass over the batch's distinct rows; see the top of the file."""
    head = config.hidden_size // config.num_attention_heads
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    layer = config.hidden_size * (2 * queries + 2 * keys + 3 * config.intermediate_size)
    tree = pack(batch.rows("ids"))
    pairs = sum(new * len(path) - new * (new - 1) // 2 for path, new in zip(tree.paths, tree.new, strict=True))
    predicted = int(batch.loss_mask.sum())
    return float(
        2 * layer * config.num_hidden_layers * tree.rows
        + 2 * config.vocab_size * config.hidden_size * predicted
        + 4 * config.num_hidden_layers * queries * pairs
    )


def distance(one: Gradients, other: Gradients) -> float:
    assert one.keys() == other.keys()
    difference = sum(float((one[name] - other[name]).double().square().sum()) for name in one)
    return float((difference / sum(float(g.double().square().sum()) for g in other.values())) ** 0.5)


def profile(work: Callable[[], object], device: torch.device) -> str:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recording

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with recording(activities=activities) as recorded:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
    order = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    return str(recorded.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=90))


class CompiledKernels(vocabulary.TorchKernels):
    """The plain kernels through `torch.compile`."""

    _summarise = staticmethod(torch.compile(vocabulary.TorchKernels().summarise, dynamic=True))
    _differentiate = staticmethod(torch.compile(vocabulary.TorchKernels().differentiate, dynamic=True))

    def summarise(self, *args: Any) -> Any:
        return self._summarise(*args)

    def differentiate(self, *args: Any) -> Any:
        return self._differentiate(*args)


HEADS = {"torch": vocabulary.TorchKernels, "compiled": CompiledKernels}


def _pairs(text: str) -> list[tuple[str, str]]:
    return [(key, value) for key, _, value in (part.partition("=") for part in text.split(",") if part)]


def _value(text: str) -> int | bool | str:
    return int(text) if text.isdigit() else {"true": True, "false": False}.get(text, text)


def _cpu_has_bf16() -> bool:
    from roll.model.loading import cpu_multiplies_bf16

    return cpu_multiplies_bf16()


if __name__ == "__main__":
    main()
