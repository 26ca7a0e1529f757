"""A decoder's matrix products on this CPU: rows of tokens left of a weight, columns right of it, or weights packed.

`rows` is `linear(x, W)`, as `transformers` computes it; `columns` is `W @ x.T`, as the engine does
(`roll.engine.cpu_forward`); `packed` is oneDNN's linear over weights that were brought into its own order before (a copy
of all weights, once for every version of them), where this build and CPU have it. Milliseconds of all of a model's
products for so many tokens, and GFLOP/s of the best. The weights are as many as the model's, so that they come from
memory.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from common import parser, report

SHAPES = {"smollm2-135m": (576, 192, 1536, 30, 49152), "qwen2.5-1.5b": (1536, 256, 8960, 28, 151936)}
"""Hidden size, that of the keys, inner size, layers, vocabulary."""
Product = Callable[[Tensor, Tensor], Tensor]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    options.add_argument("--dtype", choices=["bf16", "fp32"], default="fp32")
    options.add_argument("--rows", default="1,2,4,8,16,32,64,128,256")
    options.add_argument("--repeats", type=int, default=5, help="the best of so many is taken")
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[args.dtype]
    hidden, keys, inner, layers, vocab = SHAPES[args.shape]
    sizes = [(hidden, hidden), (keys, hidden), (keys, hidden), (hidden, hidden)]
    sizes += [(inner, hidden), (inner, hidden), (hidden, inner)]
    weights = [torch.randn(size).to(dtype) for _ in range(layers) for size in sizes] + [
        torch.randn(vocab, hidden).to(dtype)
    ]

    result: dict[str, object] = {"shape": args.shape, "dtype": args.dtype, "threads": args.threads}
    print("| tokens | rows ms | columns ms | packed ms | rows over columns | GFLOP/s |")
    print("| --- | --- | --- | --- | --- | --- |")
    for count in map(int, args.rows.split(",")):
        found = measure(weights, count, args.repeats)
        flops = 2 * count * sum(weight.numel() for weight in weights)
        packed = f"{found['packed']:.1f}" if "packed" in found else ""
        ratio = found["rows"] / found["columns"]
        print(f"| {count} | {found['rows']:.1f} | {found['columns']:.1f} | {packed} | {ratio:.2f} "
              f"| {flops / min(found.values()) / 1e6:.0f} |", flush=True)  # fmt: skip
        result |= {f"{name}_{count}_ms": value for name, value in found.items()}
        result[f"rows_over_columns_{count}"] = ratio
    if args.json:
        report(result, True)


@torch.inference_mode()
def measure(weights: list[Tensor], count: int, repeats: int) -> dict[str, float]:
    """Milliseconds of each way; they take turns."""
    tokens = {size: torch.randn(count, size).to(weights[0].dtype) for size in {weight.shape[1] for weight in weights}}
    columns = {size: rows.t().contiguous() for size, rows in tokens.items()}
    ways: dict[str, tuple[Product, dict[int, Tensor], list[Tensor]]] = {
        "rows": (torch.nn.functional.linear, tokens, weights),
        "columns": (lambda column, weight: torch.mm(weight, column), columns, weights),
    }
    try:
        order = [torch.ops.mkldnn._reorder_linear_weight(weight, count) for weight in weights]
        ways["packed"] = (lambda x, w: torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], ""), tokens, order)
        ways["packed"][0](tokens[weights[0].shape[1]], order[0])
    except (AttributeError, NotImplementedError, RuntimeError):
        ways.pop("packed", None)
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(repeats):
        for name, (product, inputs, operands) in ways.items():
            started = time.perf_counter()
            for weight, operand in zip(weights, operands, strict=True):
                product(inputs[weight.shape[1]], operand)
            best[name] = min(best[name], 1e3 * (time.perf_counter() - started))
    return best


if __name__ == "__main__":
    main()
