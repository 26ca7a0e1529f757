"""The trainer's side of the probe check that every publish makes: its log-probs of a fixed prompt.

On CUDA the pass is captured as a CUDA graph once and replayed: launching all kernels of the model one by one for a dozen
tokens would take longer than the rest of a publish.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from roll.model.cuda_capture import capturing
from roll.strategy.train.logprobs import token_log_probs
from roll.strategy.train.microbatch import MicroBatch, sequence
from roll.weight_sync.weights import probe_ids


class Probe:
    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.prompt = probe_ids(int(model.config.vocab_size))
        self._graph: torch.cuda.CUDAGraph | None = None
        self._addresses: tuple[int, ...] = ()
        """Addresses of the parameters that the graph was captured with."""
        self._inputs: MicroBatch | None = None
        self._result: Tensor | None = None

    @torch.no_grad()
    def log_probs(self) -> Tensor:
        """fp32 log-probs of the prompt's tokens after the first, under the current parameters."""
        if self._model.device.type != "cuda":
            return self._compute(sequence(self.prompt.numpy(), self._model)).cpu()
        addresses = tuple(parameter.data_ptr() for parameter in self._model.parameters())
        if self._graph is None or self._addresses != addresses:  # offloading and loading moves the parameters
            self._capture()
            self._addresses = addresses
        assert self._graph is not None
        assert self._result is not None
        self._graph.replay()
        return self._result.cpu()

    def _compute(self, inputs: MicroBatch) -> Tensor:
        return token_log_probs(self._model, inputs.hidden(self._model), inputs.predictions)[0]

    def _capture(self) -> None:
        device = self._model.device
        self._inputs = sequence(self.prompt.numpy(), self._model)
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self._compute(self._inputs)  # compiles kernels and loads libraries, which is not possible during a capture
        torch.cuda.current_stream(device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with capturing(self._graph, stream):
            self._result = self._compute(self._inputs)
