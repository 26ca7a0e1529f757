"""The model runner: launches steps (one forward pass that samples tokens) without waiting for the previous step.

On CUDA a step is a CUDA graph replay: one copy of its inputs to the device, one copy of its results back. Everything in
between is fixed before the host knows the tokens of the previous step. Graphs are captured for certain numbers of rows; a
step is padded to the next one. On other devices a step is computed synchronously.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from roll.engine.paged.decoder import Decoder
from roll.engine.paged.kv_cache import DecodeMetadata, PagedKVCache, PagedPlan, PrefillMetadata
from roll.engine.paged.step_inputs import (
    HEADER,
    POSITION,
    SAMPLES,
    SEED_HIGH,
    SEED_LOW,
    SLOT,
    TEMPERATURE,
    InputTable,
    StepInputs,
    padding,
)
from roll.engine.request import SamplingParams
from roll.engine.sampling import sample_tokens
from roll.model.attention import logits_of
from roll.model.cuda_capture import capturing

_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)
_PROMPT_SIZES = (256, 512, 1024, 2048, 4096)
"""Numbers of prompt rows that a graph has besides the rows that sample."""
_FEW = 64
"""Up to this many rows in total, prompt rows are computed one by one like rows that sample."""
_STAGING_BUFFERS = 4
"""Number of pinned staging buffers, used in rotation for inputs."""


@dataclass
class AsyncOutput:
    """The pending output of a step: a token and a log-prob per row."""

    results: Tensor
    """On the host: [2, rows] int32; the second line holds the bits of the log-probs."""
    count: int
    done: torch.cuda.Event | None

    def read(self) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Waits for the step."""
        if self.done is not None:
            self.done.synchronize()
        tokens, bits = self.results.numpy()[:, : self.count]
        return tokens.copy(), bits.view(np.float32).copy()


@dataclass
class _StagingBuffer:
    """A pinned staging buffer; it may be reused once its copy to the device is done."""

    memory: Tensor
    copied: torch.cuda.Event


class _Graph:
    """A CUDA graph for one number of rows."""

    def __init__(self, rows: StepInputs, compute: Mapping[str, Tensor], graph: torch.cuda.CUDAGraph) -> None:
        self.rows, self.results, self.logits, self.graph = rows, compute["results"], compute["logits"], graph


class ModelRunner:
    def __init__(
        self,
        model: PreTrainedModel,
        decoder: Decoder,
        cache: PagedKVCache,
        slots: int,
        width: int,
        stream: torch.cuda.Stream | None,
    ) -> None:
        """For `slots` sequences of at most `width` blocks each. On CUDA, graphs are captured on `stream`."""
        self._model = model
        self._decoder = decoder
        self._cache = cache
        self._slots = slots
        self._width = width
        self._device = cache.keys.device
        self._last = torch.zeros(slots + 1, dtype=torch.int32, device=self._device)
        """Every slot's last sampled token; the entry after the slots is for padding rows."""
        self._cap = getattr(model.config, "final_logit_softcapping", None)
        self._stream = stream
        self._graphs: dict[int, _Graph] = {}
        self._memory = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None
        self._staging_buffers: deque[_StagingBuffer] = deque()
        self._logits: Tensor | None = None

    def switch_cache(self, cache: PagedKVCache, width: int) -> None:
        """Switches to another cache with the same contents and drops the graphs. No step may be in flight."""
        self._graphs.clear()
        if self._memory is not None:
            torch.cuda.empty_cache()  # graphs cannot be captured in a pool that keeps the memory of dropped ones
            self._memory = torch.cuda.graph_pool_handle()
        self._cache, self._width = cache, width

    @property
    def most_prompt_rows(self) -> int:
        """Prompt rows of the largest graph."""
        return _PROMPT_SIZES[-1]

    @cached_property
    def tile(self) -> int:
        """The prompt rows of a sequence in a step are padded to a multiple of this."""
        if self._device.type != "cuda":
            return 1
        from roll.engine.paged import attention_kernels as kernels

        return kernels.tile_rows(int(self._model.config.num_attention_heads), self._cache.keys.shape[2])

    @torch.inference_mode()
    def prefill(self, table: InputTable, spans: list[tuple[int, int]], key_at: NDArray[np.int64]) -> None:
        """Prefill: computes prompt rows without sampling."""
        rows = StepInputs(self._to_device(table))
        key_at_device = torch.from_numpy(key_at)
        if self._device.type == "cuda":
            key_at_device = key_at_device.pin_memory().to(self._device, non_blocking=True)
        self._hidden(rows, PrefillMetadata(self._cache, rows, spans, key_at_device))

    def _hidden(self, rows: StepInputs, plan: PagedPlan) -> Tensor:
        hidden = self._decoder.hidden(rows, self._last, plan)
        if self._cache.routes is not None:
            routes = self._decoder.routes
            assert routes is not None, "a decoder records what there are pages for"
            if rows.count > len(routes):  # no routes recorded for such a pass; -1 is `free` in any integer type
                routes = torch.full((rows.count, *routes.shape[1:]), -1, device=self._device)
            plan.store_routes(routes[: rows.count])
        return hidden

    @torch.inference_mode()
    def sample(
        self, decode: InputTable, prompts: Sequence[InputTable], truncated: Mapping[int, SamplingParams]
    ) -> AsyncOutput:
        """Launches a step: one sampling row per slot, followed by the prompt rows. `truncated` are the rows with top-k or
        top-p, which wait for the device."""
        count, prompt_rows = decode.shape[1], sum(table.shape[1] for table in prompts)
        if self._device.type != "cuda":
            return self._sample_at_once(np.concatenate([decode, *prompts], axis=1), truncated)
        if prompt_rows and count + prompt_rows > min(_FEW, self._slots):
            tiles = [padding(table, -(-table.shape[1] // self.tile) * self.tile, self._slots) for table in prompts]
            graph = self._replay(np.concatenate([padding(decode, self._slots, self._slots), *tiles], axis=1))
        else:
            graph = self._replay(np.concatenate([decode, *prompts], axis=1))
        if truncated:
            self._resample(graph.logits, graph.results, decode, truncated)
        results = torch.empty(graph.results.shape, dtype=torch.int32, pin_memory=True)
        results.copy_(graph.results, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return AsyncOutput(results, min(count, results.shape[1]), done)

    @torch.inference_mode()
    def logits(self, table: InputTable) -> Tensor:
        """fp32 logits of rows that do not sample, computed the same way as those that do. [rows, vocab]"""
        count = table.shape[1]
        wide = self._replay(table).logits[:count].float()
        return torch.tanh(wide / self._cap) * self._cap if self._cap else wide

    def _replay(self, table: InputTable) -> _Graph:
        size = next(size for size in _sizes(self._slots) if size >= table.shape[1])
        graph = self._graphs.get(size)
        if graph is None:
            graph = self._graphs[size] = self._capture(size)
        self._copy_in(padding(table, size, self._slots), graph.rows.data)
        graph.graph.replay()
        return graph

    def _copy_in(self, table: InputTable, data: Tensor) -> None:
        """Copies the inputs into the first lines of a graph's input table, without waiting."""
        numbers = table.size
        buffer = self._staging_buffers.popleft() if len(self._staging_buffers) == _STAGING_BUFFERS else None
        if buffer is not None:
            buffer.copied.synchronize()
        if buffer is None or buffer.memory.numel() < numbers:
            memory = torch.empty(1 << (numbers - 1).bit_length(), dtype=torch.int32, pin_memory=True)
            buffer = _StagingBuffer(memory, torch.cuda.Event())  # type: ignore[no-untyped-call]
        buffer.memory.numpy()[:numbers] = table.reshape(-1)
        data.view(-1)[:numbers].copy_(buffer.memory[:numbers], non_blocking=True)
        buffer.copied.record()
        self._staging_buffers.append(buffer)

    def _to_device(self, table: InputTable) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(table))
        return tensor.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else tensor

    def _capture(self, size: int) -> _Graph:
        rows = StepInputs(torch.zeros(HEADER + self._width, size, dtype=torch.int32, device=self._device))
        rows.slots.fill_(self._slots)
        stream = self._stream
        assert stream is not None
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._compute(rows)  # compiles kernels and loads libraries, which is not possible during a capture
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, stream, self._memory):
            computed = self._compute(rows)
        return _Graph(rows, computed, graph)

    def _compute(self, rows: StepInputs) -> dict[str, Tensor]:
        from roll.engine.paged import sampling_kernels as kernels

        sampling_count = min(rows.count, self._slots)
        hidden = self._hidden(rows, DecodeMetadata(self._cache, rows, sampling_count))[:sampling_count]
        logits = self._logits_of(hidden)
        results = torch.empty(2, sampling_count, dtype=torch.int32, device=self._device)
        kernels.sample(logits, rows, self._last, results, self._cap)
        return {"results": results, "logits": logits}

    def _logits_of(self, hidden: Tensor) -> Tensor:
        """Logits in a buffer that all graphs share. If the logits of a step are read, then before the next step is
        launched."""
        output = self._model.get_output_embeddings()
        if type(output) is not nn.Linear or getattr(output, "bias", None) is not None:
            logits: Tensor = output(hidden)
            return logits
        if self._logits is None:
            self._logits = hidden.new_empty(self._slots, output.out_features)
        return torch.mm(hidden, output.weight.t(), out=self._logits[: len(hidden)])

    def _resample(
        self, logits: Tensor, results: Tensor, table: InputTable, truncated: Mapping[int, SamplingParams]
    ) -> None:
        rows = sorted(truncated)
        wide = logits[rows].float()
        if self._cap:
            wide = torch.tanh(wide / self._cap) * self._cap
        lengths = [int(table[POSITION, row]) + 1 for row in rows]
        tokens, log_probs = sample_tokens(wide, list(range(len(rows))), [truncated[row] for row in rows], lengths)
        sampled = torch.tensor(tokens, dtype=torch.int32, device=self._device)
        results[0, rows] = sampled
        results[1, rows] = torch.tensor(log_probs, device=self._device).view(torch.int32)
        self._last[torch.from_numpy(table[SLOT, rows].astype(np.int64)).to(self._device)] = sampled

    def _sample_at_once(self, table: InputTable, truncated: Mapping[int, SamplingParams]) -> AsyncOutput:
        rows = StepInputs(self._to_device(table))
        logits = logits_of(self._model, self._hidden(rows, DecodeMetadata(self._cache, rows)))
        sampling = np.flatnonzero(table[SAMPLES])
        samplings = [truncated.get(int(row)) or _sampling(table[:, row]) for row in sampling]
        tokens, log_probs = sample_tokens(logits, sampling.tolist(), samplings, (table[POSITION, sampling] + 1).tolist())
        results = torch.zeros(2, rows.count, dtype=torch.int32)
        results[0, sampling] = torch.tensor(tokens, dtype=torch.int32)
        results[1, sampling] = torch.tensor(log_probs, dtype=torch.float32).view(torch.int32)
        self._last[torch.from_numpy(table[SLOT, sampling].astype(np.int64))] = results[0, sampling]
        return AsyncOutput(results, rows.count, None)


def _sampling(column: NDArray[np.int32]) -> SamplingParams:
    low, high = (int(column[line]) & 0xFFFFFFFF for line in (SEED_LOW, SEED_HIGH))
    return SamplingParams(
        1, temperature=float(column[TEMPERATURE : TEMPERATURE + 1].view(np.float32)[0]), seed=high << 32 | low
    )


def _sizes(slots: int) -> list[int]:
    """Numbers of rows that graphs are captured for: sampling rows alone, and all slots plus prompt rows."""
    sizes = [size for size in _SIZES if size < slots]
    sizes += range(640, slots, 128)
    return [*sizes, slots, *(slots + rows for rows in _PROMPT_SIZES)]
