"""An engine with a model of its own, loaded from disk. It never receives a trainer's weights.

Invariant: it serves only the loaded model, and only after its log-probs of the probe agree with a plain forward pass over
the same parameters.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from roll.cluster.worker import WorkerPlacement
from roll.config.schema import Config
from roll.model.find import find_model
from roll.model.loading import choose_dtype, load_model, load_tokenizer
from roll.strategy.infer.base import InferStrategy
from roll.strategy.infer.factory import vllm_engine
from roll.strategy.infer.native import NativeStrategy
from roll.strategy.offload import Residency, TensorOffloader
from roll.strategy.train.probe import Probe
from roll.weight_sync.weights import Weights

VERSION = 0


def judge_config(config: Config) -> Config:
    """The config with the judge in place of the actor."""
    judge = config.roles.judge
    roles = config.roles.model_copy(update={"actor_infer": judge})
    model = config.model.model_copy(update=judge.model.model_dump())
    rollout = config.rollout.model_copy(update={"max_running": judge.max_running, "kv_cache_tokens": 0})
    return config.model_copy(update={"model": model, "roles": roles, "rollout": rollout})


class FrozenEngine:
    """The judge's engine."""

    def __init__(self, placement: WorkerPlacement, config: Config) -> None:
        self._placement, self._config = placement, judge_config(config)
        self._source = find_model(self._config.model.path)
        self._model: PreTrainedModel | None = None
        """The parameters that the embedded engine serves; vLLM has its own."""
        self._offloader: TensorOffloader | None = None
        self._native = config.roles.judge.strategy != "vllm"
        self.strategy: InferStrategy
        if self._native:
            tokenizer = load_tokenizer(self._source, self._config.model)
            running, exact = self._config.rollout.max_running, config.deterministic
            self.strategy = NativeStrategy(tokenizer, max_running=running, exact=exact)
        else:
            self.strategy = vllm_engine(placement, self._config, "judge")

    async def start(self) -> None:
        """Loads the weights, verifies them and starts to serve them."""
        device = self._placement.device if self._native else "cpu"
        dtype = choose_dtype(self._config.model.dtype, self._placement.device)
        model = load_model(self._source, dtype, self._config.seed).to(device).requires_grad_(False)
        await self.strategy.load_weights(_weights(model))
        if self._native:
            self._model, self._offloader = model, TensorOffloader(model.device)

    async def set_residency(self, level: Residency) -> None:
        await self.strategy.set_residency(level)
        if self._model is None or self._offloader is None:
            return
        weights = dict(self._model.named_parameters())
        if level == "none":
            self._offloader.offload(weights)
        else:
            self._offloader.onload(weights)

    async def close(self) -> None:
        await self.strategy.close()


def _weights(model: PreTrainedModel) -> Weights:
    probe = Probe(model)
    return Weights(VERSION, model, dict(model.named_parameters()), probe.prompt, probe.log_probs())
