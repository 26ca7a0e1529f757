"""Engines for the contract that all of them keep, and the trainer they get their weights from."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from hypothesis_examples import ALL
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from roll.config.schema import TrainConfig
from roll.data import Batch, Sample, Task
from roll.engine.request import Completion, Request, SamplingParams
from roll.model import attention
from roll.model.loading import in_precision
from roll.model.tiny import character_tokenizer
from roll.strategy.infer.base import InferStrategy
from roll.strategy.train.single import SingleStrategy

T = TypeVar("T")

TOKENIZER = character_tokenizer()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONTEXT = 512
MAX_RUNNING = 8
WAIT_S = 120.0
PROMPT = (5, 9, 40)


def shape(**settings: Any) -> LlamaConfig:
    sizes = {"hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaConfig(
        **{
            **sizes,
            "vocab_size": len(TOKENIZER),
            "num_key_value_heads": 1,
            "max_position_embeddings": CONTEXT,
            "initializer_range": 0.15,  # far from uniform, so that differences show
            "architectures": ["LlamaForCausalLM"],
            **settings,
        }
    )


def model(seed: int, dtype: torch.dtype = torch.float32, **settings: Any) -> LlamaForCausalLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = LlamaForCausalLM(shape(**settings))
    made.set_attn_implementation(attention.NAME)
    return in_precision(made.to(DEVICE), dtype).eval()


def flat_model() -> LlamaForCausalLM:
    """All tokens are equally likely, so that what is drawn is the noise alone."""
    made = model(0)
    torch.nn.init.zeros_(made.lm_head.weight)
    return made


def native(dtype: torch.dtype, shape: LlamaConfig) -> InferStrategy:
    from roll.strategy.infer.native import NativeStrategy

    return NativeStrategy(TOKENIZER, max_running=MAX_RUNNING, exact=False)


def native_receiving(engine: InferStrategy) -> InferStrategy:
    from roll.strategy.infer.native import NativeStrategy

    return NativeStrategy(TOKENIZER, max_running=MAX_RUNNING, exact=False, model=model(7))


def exact(dtype: torch.dtype, shape: LlamaConfig) -> InferStrategy:
    """With room for four of the longest sequences, so that requests wait not only for seats."""
    from roll.strategy.infer.native import NativeStrategy

    return NativeStrategy(TOKENIZER, max_running=MAX_RUNNING, exact=True, kv_tokens=4 * CONTEXT)


def exact_receiving(engine: InferStrategy) -> InferStrategy:
    from roll.strategy.infer.native import NativeStrategy

    return NativeStrategy(TOKENIZER, max_running=MAX_RUNNING, exact=True, model=model(7))


def paged(dtype: torch.dtype, shape: LlamaConfig) -> InferStrategy:
    return _paged_strategy()(TOKENIZER, max_running=MAX_RUNNING, exact=False)


def paged_receiving(engine: InferStrategy) -> InferStrategy:
    return _paged_strategy()(TOKENIZER, max_running=MAX_RUNNING, exact=False, model=model(7))


def _paged_strategy() -> Any:
    """The embedded engine over a paged cache, which is the one on a GPU, wherever it runs."""
    from roll.engine.paged.engine import PagedEngine
    from roll.strategy.infer.native import NativeStrategy

    class Paged(NativeStrategy):
        def _make_engine(self, model: Any, version: int) -> PagedEngine:
            return PagedEngine(model, TOKENIZER, max_running=MAX_RUNNING, version=version)

    return Paged


def vllm(dtype: torch.dtype, shape: LlamaConfig) -> InferStrategy:
    from roll.strategy.infer.vllm import VllmStrategy
    from roll.strategy.infer.vllm_args import bytes_per_token
    from roll.strategy.infer.vllm_engine import VllmSettings

    # A small cache, and room for one prompt in a pass, so that requests wait not only for seats.
    size = MAX_RUNNING * CONTEXT * bytes_per_token(shape, 4)
    cache = {"kv_cache_memory_bytes": size, "max_num_batched_tokens": CONTEXT, "enforce_eager": True}
    memory = {} if DEVICE == "cpu" else {"gpu_memory_utilization": 0.02}
    settings = VllmSettings(
        None, shape, dtype, MAX_RUNNING, DEVICE, sleeps=DEVICE == "cuda", args={**cache, **memory}, environment=THREADS
    )
    return VllmStrategy(TOKENIZER, settings)


THREADS = {"OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Kind:
    """How an engine is made within an event loop, and one that receives weights from a trainer elsewhere."""

    make: Callable[[torch.dtype, LlamaConfig], InferStrategy]
    receiving: Callable[[InferStrategy], InferStrategy] = lambda engine: engine
    same_noise: bool = False
    """Whether a request that goes on from a prefix draws what it would have drawn."""
    dies: bool = True
    """Whether it has processes of its own that may die."""
    many: int = 1000
    """Requests that wait for a small cache."""


FEWER = 1000 if DEVICE == "cuda" else 200
KINDS = {
    "native": Kind(native, native_receiving, same_noise=True, dies=False, many=1000 if ALL else FEWER),
    "exact": Kind(exact, exact_receiving, same_noise=True, dies=False, many=40),
    "paged": Kind(paged, paged_receiving, same_noise=True, dies=False, many=FEWER),
    "vllm": Kind(vllm),
}
MARKS = {"vllm": [pytest.mark.vllm], "exact": [pytest.mark.thorough]}
"""`tests/engine` has what is the exact engine's own; the rest it shares with the native one."""
ENGINES = [pytest.param(name, marks=MARKS.get(name, [])) for name in KINDS]


@dataclass
class Served:
    """An engine and the trainer whose weights it serves, in one event loop."""

    kind: Kind
    runner: asyncio.Runner
    trainer: SingleStrategy
    engine: InferStrategy
    version: int = 0
    _models: dict[int, LlamaForCausalLM] = field(default_factory=dict)

    @classmethod
    def start(cls, name: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Served:
        """`settings`: of the model's shape."""
        runner = asyncio.Runner()

        async def make() -> InferStrategy:
            return KINDS[name].make(dtype, shape(**settings))

        trainer = SingleStrategy(model(0, dtype, **settings), TOKENIZER, TrainConfig(), trainable=False)
        return cls(KINDS[name], runner, trainer, runner.run(make()))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        async def bounded() -> T:
            return await asyncio.wait_for(work, WAIT_S)

        return self.runner.run(bounded())

    def change(self, values: LlamaForCausalLM) -> None:
        """Gives the trainer the weights of another model, in place."""
        self.trainer.model.load_state_dict(values.state_dict())

    async def publish(self, values: LlamaForCausalLM) -> None:
        self.change(values)
        self.version += 1
        await self.engine.load_weights(self.trainer.weights(self.version))

    async def drain(self) -> dict[str, Completion]:
        """Everything the engine still gives."""
        found: dict[str, Completion] = {}
        while results := await self.engine.results():
            assert not found.keys() & {done.id for done in results}
            found |= {done.id: done for done in results}
        return found

    async def generate(self, *requests: Request) -> dict[str, Completion]:
        self.engine.submit(requests)
        return await self.drain()

    async def until_drawn(self, id: str, tokens: int) -> int:
        """Lets the engine work until a request has so many tokens; how many it has then."""
        waiting = asyncio.ensure_future(self.engine.results())
        try:
            while True:
                told = [len(progress.ids) for progress in self.engine.progress({}) if progress.id == id]
                if told and told[0] >= tokens:
                    return told[0]
                assert not waiting.done(), f"{waiting.result()} ended first"
                await asyncio.sleep(0.001)
        finally:
            waiting.cancel()

    def close(self) -> None:
        self.run(self.engine.close())
        self.runner.close()


def request(id: str, new_tokens: int = 8, ids: Sequence[int] = PROMPT, **sampling: Any) -> Request:
    return Request(id, np.array(ids, np.int32), SamplingParams(new_tokens, **sampling))


def resumed(request: Request, drawn: Completion, id: str = "") -> Request:
    """The request that goes on from what was drawn."""
    ids = np.concatenate([request.ids, drawn.ids])
    left = request.sampling.max_new_tokens - len(drawn.ids)
    sampling = SamplingParams(**{**request.sampling.__dict__, "max_new_tokens": left})
    return Request(id or request.id, ids, sampling, request.sampled_tokens + len(drawn.ids))


def trainers_log_probs(trainer: SingleStrategy, asked: Request, done: Completion) -> Tensor:
    """What the trainer says of the tokens that were drawn."""
    sample = Sample(asked.id, Task.ask("t", "?"), 0, asked.sampling.temperature or 1.0)
    sample.log.prompt(asked.ids.tolist())
    sample.log.respond(done.ids.tolist(), done.logprobs, done.versions.tolist())
    found = trainer.log_probs(Batch.from_samples([sample]))
    return torch.from_numpy(found[len(asked.ids) :])


@torch.no_grad()
def logits_after(model: LlamaForCausalLM, ids: Sequence[int], drawn: Sequence[int]) -> Tensor:
    """fp32 logits that each drawn token was drawn from. [drawn, vocab]"""
    whole = torch.tensor([[*ids, *drawn]], device=DEVICE)
    return plain(model)(whole).logits[0, len(ids) - 1 : -1].float().cpu()


def plain(model: LlamaForCausalLM, attention: str = "eager") -> LlamaForCausalLM:
    """A copy with an attention of `transformers`."""
    copy = in_precision(LlamaForCausalLM(model.config).to(DEVICE), model.dtype).eval()
    copy.load_state_dict(model.state_dict())
    copy.set_attn_implementation(attention)
    return copy


@torch.no_grad()
def forward_log_probs(model: PreTrainedModel, prompt: Sequence[int], drawn: Sequence[int]) -> Tensor:
    """By the model's own forward pass over all tokens."""
    ids = torch.tensor([[*prompt, *drawn]], device=DEVICE)
    logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])[:, 0].cpu()
