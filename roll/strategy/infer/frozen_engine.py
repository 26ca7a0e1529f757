"""An engine with a model of its own, loaded from disk. It never receives a trainer's weights.

Invariant: it serves only the loaded model, and only after its log-probs of the probe agree with a plain forward pass over
the same parameters.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from roll.cluster.worker import WorkerPlacement
from roll.config.schema import Config
from roll.model.find import find_model
from roll.model.loading import choose_dtype, load_model
from roll.strategy.infer.base import InferStrategy
from roll.strategy.infer.engine_role import EngineRole
from roll.strategy.offload import Residency, TensorOffloader
from roll.strategy.registry import engine_backend_of
from roll.strategy.train.probe import Probe
from roll.weight_sync.weights import Weights

VERSION = 0


class FrozenEngine:
    """The judge's engine."""

    def __init__(self, placement: WorkerPlacement, config: Config) -> None:
        self._placement, self._config = placement, config
        self._role = EngineRole.of(config, placement.role)
        self._source = find_model(self._role.model.path)
        self._model: PreTrainedModel | None = None
        """The parameters that the engine serves in place; other engines have their own."""
        self._offloader: TensorOffloader | None = None
        backend = engine_backend_of(config, placement.role)
        self._in_place = backend.in_place
        self.strategy: InferStrategy = backend.engine(config, placement, self._role, own_weights=False)

    async def start(self) -> None:
        """Loads the weights, verifies them and starts to serve them."""
        device = self._placement.device if self._in_place else "cpu"
        dtype = choose_dtype(self._role.model.dtype, self._placement.device)
        model = load_model(self._source, dtype, self._config.seed).to(device).requires_grad_(False)
        await self.strategy.load_weights(_weights(model))
        if self._in_place:
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
